"""Steps in fp8: bytes by arithmetic, kernels that gain what their limit allows, and casts of what a
block multiplies.
"""

import random
from collections.abc import Mapping
from dataclasses import replace

import pytest

from cs336.config import SIZES, Attention, Device, OptimizerKind, Phase, Precision, RunConfig
from cs336.costs.curves import transferred_curves, with_fp8
from cs336.costs.hardware import DEVICES, find_device
from cs336.costs.kernels import KernelModel, ProductPrecision, Rates
from cs336.costs.layout import Layout
from cs336.costs.layout_cost import LayoutCost, layout_cost
from cs336.costs.layout_memory import Rank
from cs336.costs.memory import predicted_peak_bytes
from cs336.costs.rank_operations import rank_operations
from cs336.costs.ranks_time import Links
from cs336.costs.recipes import Recipe, cast_bytes, casts
from cs336.costs.tape import Form, Names, OperationKind, OperationMaker
from cs336.costs.time import step_time
from cs336.record import RunRecord, load_records
from cs336.studies.ceilings_design import attention_shapes, drawn_matmuls
from cs336.studies.ceilings_files import Ceilings, data_sheet_curves
from tests.committed import committed_runs

FP8, BF16 = ProductPrecision.FP8, ProductPrecision.BF16
SHIPPED = Ceilings(has_shipped=True)
RATES = Rates(multiprocessors=1, flops_per_s=1e15, bytes_per_s=1e12, kernel_s=0, element_bytes=1)
LINKS = Links(gpus_per_node=8, node_bytes_per_s=450e9)


def config_of(size: str = "8B") -> RunConfig:
    model = replace(SIZES[size], attention=Attention.SDPA, context_length=4096)
    return RunConfig(
        size=size,
        model=model,
        device=Device.CUDA,
        precision=Precision.BF16,
        optimizer=OptimizerKind.FUSED,
    )


def cost_of(layout: Layout, device_name: str = "H100 80GB HBM3") -> LayoutCost:
    curves = SHIPPED.curves(device_name)
    assert curves is not None
    cost = layout_cost(config_of(), layout, curves, LINKS)
    assert isinstance(cost, LayoutCost), cost
    return cost


@pytest.mark.parametrize(
    ("recipe", "scales", "reads"),
    [(Recipe.TENSOR, 0, 2), (Recipe.BLOCKS, 4 / 128, 1), (Recipe.MX, 1 / 32, 1)],
)
def test_casts_read_bf16_and_write_both_layouts_with_scales(
    recipe: Recipe, scales: float, reads: int
) -> None:
    """One fp32 scale for 128 elements, or one byte for 32; one scale of a whole tensor has to be
    found by reading it once more.
    """
    elements = 2**20
    assert cast_bytes(recipe, elements) == 2 * elements * (1 + scales)
    moved_bytes = [operation.moved_bytes for operation in casts(recipe, elements)]
    assert len(moved_bytes) == reads
    assert sum(moved_bytes) == 2 * elements * reads + cast_bytes(recipe, elements)


def test_a_matmul_in_fp8_moves_a_byte_of_factors_and_two_of_results() -> None:
    maker = OperationMaker(Names({}))
    operation = maker.matmul("forward", "48", "80", "112", 1, "1")
    assert operation.moved_bytes == 48 * 80 + 80 * 112 + 2 * 48 * 112


def test_a_matmul_that_memory_limits_gains_its_bytes_alone() -> None:
    """With an inner side of 16 the result is most of what is moved, in fp8 as in bf16."""
    shape = 1, 8192, 16, 8192
    slow = replace(RATES, flops_per_s=1e18)
    seconds = {
        element_bytes: replace(slow, element_bytes=element_bytes).model_s(Form.FORWARD, shape)
        for element_bytes in (1, 2)
    }
    factors, result = 2 * 8192 * 16, 8192 * 8192
    gain = (factors + 2 * result) / (2 * factors + 2 * result)
    assert seconds[1] / seconds[2] == pytest.approx(gain, rel=1e-3)


def drawn_shapes(count: int) -> list[tuple[int, int, int, int]]:
    chance = random.Random(62)
    shapes = []
    for _ in range(count):
        rows, inner, columns = (16 * round(2 ** chance.uniform(0, 10)) for _ in range(3))
        shapes.append((1, rows, inner, columns))
    return shapes


@pytest.mark.parametrize("device_name", ["H100 80GB HBM3", "H200"])
def test_more_work_in_fp8_is_never_foretold_faster(device_name: str) -> None:
    curves = SHIPPED.curves(device_name)
    assert curves is not None
    rates = curves.rates(FP8)
    assert rates is not None
    kernels = KernelModel(rates, curves.matmuls[FP8])
    for form in (Form.FORWARD, Form.INPUT):
        for shape in drawn_shapes(300):
            less = kernels.time(form, shape).time_s
            for side in (1, 2, 3):
                longer = [*shape]
                longer[side] *= 2
                batch, rows, inner, columns = longer
                more = kernels.time(form, (batch, rows, inner, columns)).time_s
                assert less <= more * (1 + 1e-9), (form, shape, side)


def test_twice_the_peak_of_fp8_is_never_slower_and_changes_nothing_else() -> None:
    device, source = find_device("B200"), find_device("H200")
    reference = SHIPPED.curves("H200")
    assert device is not None
    assert source is not None
    assert reference is not None
    assert device.fp8_peak_flops_per_s is not None
    twice = replace(device, fp8_peak_flops_per_s=2 * device.fp8_peak_flops_per_s)
    once, double = (transferred_curves(reference, source, one) for one in (device, twice))
    assert once.matmuls[BF16] == double.matmuls[BF16]
    for slow, fast in zip(once.matmuls[FP8], double.matmuls[FP8], strict=True):
        assert fast.time_s <= slow.time_s
    rates = [one.rates(FP8) for one in (once, double)]
    for shape in drawn_shapes(200):
        seconds = [one.model_s(Form.FORWARD, shape) for one in rates if one is not None]
        assert seconds[1] <= seconds[0]


def test_fp8_that_was_not_measured_is_as_efficient_as_bf16() -> None:
    """Large matmuls gain what the peaks of the data sheet promise, and no device gains fp8."""
    curves = SHIPPED.curves("H200")
    assert curves is not None
    without = replace(curves, matmuls={BF16: curves.matmuls[BF16]})
    filled = with_fp8(without, find_device("H200"))
    assert not filled.has_fp8
    bf16, fp8 = (filled.matmul_time(name, 16384, 16384, 16384) for name in (BF16, FP8))
    assert bf16 is not None
    assert fp8 is not None
    assert bf16.time_s / fp8.time_s == pytest.approx(1979 / 989.5, rel=0.05)
    assert with_fp8(without, find_device("A100-SXM4-80GB")) is without
    assert with_fp8(curves, find_device("H200")) is curves


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.names[0])
def test_data_sheets_alone_give_fp8_where_they_have_it(device) -> None:
    time = data_sheet_curves(device).matmul_time(FP8, 8192, 8192, 8192)
    peak = device.fp8_peak_flops_per_s
    assert (time is None) is (peak is None)
    if time is not None and peak is not None:
        assert peak / 3 < 2 * 8192**3 / time.time_s < peak


# layouts


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_block_casts_what_its_layers_read_and_their_gradients(tensor: int) -> None:
    """Read are the input of q, k and v, that of the projection, that of the first matmuls, and the
    hidden activations; gradients are those of all results.
    """
    config = config_of()
    model = config.model
    rank = Rank(config=config, layout=Layout(tensor=tensor, fp8=Recipe.MX))
    tokens, width, hidden = model.context_length, model.d_model, model.d_ff
    widths = {
        Phase.FORWARD: 3 * width + hidden,
        Phase.BACKWARD: 3 * width + width + 2 * hidden + width,
    }
    for phase, columns in widths.items():
        keys = rank.steps[0].launches[phase].block
        every = [
            rank_operations(keys, rank.names, tensor, 1, recipe=recipe)
            for recipe in (None, Recipe.MX)
        ]
        multiplied = [sum(one.multiplications for one in ones) for ones in every]
        assert multiplied[0] == multiplied[1]
        matmuls = [one for one in every[1] if one.kind is OperationKind.MATMUL]
        assert {one.element_bytes for one in matmuls} == {1}
        # weights are cast to bf16, and gradients back, no more: 6 bytes of each element
        passes = [[one for one in ones if one.kind is OperationKind.PASS] for ones in every]
        before_bytes, after_bytes = (sum(one.moved_bytes for one in ones) for ones in passes)
        elements = rank.linear_elements((0,))
        cast = casts(Recipe.MX, tokens * columns // tensor)
        expected = sum(one.moved_bytes for one in cast) - 6 * elements
        assert after_bytes - before_bytes == pytest.approx(expected, abs=64), phase


def test_a_step_in_fp8_is_faster_and_keeps_the_weights_besides() -> None:
    for layout in (Layout(), Layout(tensor=2, pipeline=2, accumulate=4)):
        bf16, fp8 = (cost_of(replace(layout, fp8=recipe)) for recipe in (None, Recipe.BLOCKS))
        assert bf16.step_s / 2 < fp8.step_s < bf16.step_s
        assert fp8.peak_bytes < bf16.peak_bytes + cast_bytes(Recipe.BLOCKS, 34 * 240 * 10**6)
        assert fp8.flops == bf16.flops


def test_one_scale_for_a_tensor_costs_a_pass_more_than_many_scales() -> None:
    by_tensor, by_blocks = (cost_of(Layout(fp8=one)) for one in (Recipe.TENSOR, Recipe.BLOCKS))
    assert by_tensor.time.compute_s > by_blocks.time.compute_s


# our own steps


def published() -> Mapping[RunConfig, list[RunRecord]]:
    """The published records of steps of one rank in fp8, by configuration."""
    records: dict[RunConfig, list[RunRecord]] = {}
    for runs in committed_runs():
        for record in load_records(runs)[0]:
            if record.config.fp8 and not record.config.is_shared:
                records.setdefault(replace(record.config, repeat=0), []).append(record)
    return records


def test_published_steps_in_fp8_took_as_long_as_foretold_and_as_much_memory() -> None:
    """Their shapes were measured for none of the ceilings; nothing was tuned on them."""
    every = published()
    assert len(every) == 17
    for config, records in every.items():
        curves = SHIPPED.curves(records[0].device_name or "")
        assert curves is not None
        time, peak_bytes = step_time(config, curves), predicted_peak_bytes(config)
        assert time is not None
        step = records[0].measurement(Phase.STEP)
        assert step is not None
        assert time.step_s == pytest.approx(step.median_s, rel=0.1)
        assert time.low_s is not None
        assert time.high_s is not None
        assert time.low_s < step.median_s < time.high_s
        assert records[0].memory is not None
        assert peak_bytes == pytest.approx(records[0].memory.peak_allocated_bytes, rel=0.01)


def test_ceilings_draw_matmuls_that_hardware_takes_in_fp8() -> None:
    """As many with fast sums as with full ones, of sides in multiples of 16 and no attention."""
    shapes = list(drawn_matmuls(FP8, 20))
    forms = [shape.form for shape in shapes]
    assert forms.count(Form.FORWARD) == forms.count(Form.INPUT) == len(shapes) / 2 == 10
    assert not any(shape.inner % 16 or shape.columns % 16 for shape in shapes)
    assert not list(attention_shapes(FP8, (1024,)))
