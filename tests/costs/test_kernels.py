"""The model of kernels: what was measured comes back, more work is never foretold faster, and what
does not matter changes nothing.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from math import prod

import pytest

from cs336.config import SIZES, Attention, Device, Mode, Precision, RunConfig
from cs336.costs.hardware import DEVICES, find_device
from cs336.costs.kernels import KernelModel, Matmul, Rates, transferred
from cs336.costs.tape import MATMULS_OF, Form
from cs336.costs.time import step_time
from cs336.studies.ceilings_files import Ceilings, data_sheet_curves

RATES = Rates(multiprocessors=4, flops_per_s=1e12, bytes_per_s=1e12, kernel_s=1e-6, element_bytes=2)
SMALL = Matmul(rows=512, inner=512, columns=512, form=Form.FORWARD, time_s=4e-4)
LARGE = Matmul(rows=2048, inner=512, columns=2048, form=Form.FORWARD, time_s=6e-3)
SHIPPED = Ceilings(has_shipped=True)
DEVICE_NAMES = "H100 80GB HBM3", "H200"
STEP_PRECISIONS = Precision.FP32, Precision.TF32, Precision.BF16
NUM_PAIRS, NUM_STEPS = 2000, 150

Shape = tuple[int, int, int, int]


def model(device_name: str, precision: Precision) -> KernelModel:
    """The model of a device whose ceilings come with the program."""
    curves = SHIPPED.curves(device_name)
    assert curves is not None
    rates = curves.rates(precision)
    assert rates is not None
    return KernelModel(rates, curves.matmuls[precision])


def test_measured_kernels_have_their_times_and_bound_others() -> None:
    kernels = KernelModel(RATES, [SMALL, LARGE])
    for measured in (SMALL, LARGE):
        time = kernels.time(Form.FORWARD, measured.shape)
        assert time.low_s == time.time_s == time.high_s == measured.time_s
        assert not time.is_extrapolated
        assert kernels.has(Form.FORWARD, measured.shape)
    between = kernels.time(Form.FORWARD, (1, 1024, 512, 1024))
    assert SMALL.time_s <= between.low_s <= between.time_s <= between.high_s <= LARGE.time_s
    assert not kernels.has(Form.FORWARD, (1, 1024, 512, 1024))


def test_a_large_matmul_reaches_the_rate_and_a_long_pass_the_bandwidth() -> None:
    """With 2 n^3 FLOPs, of which tiles cost a tenth more at most; and 2 bytes of each element of a
    product with an inner side of 1.
    """
    side = 16384
    assert RATES.model_s(Form.FORWARD, (1, side, side, side)) == pytest.approx(
        2 * side**3 / 1e12, rel=0.15
    )
    bytes_s = 2 * (side**2 + 2 * side) / 1e12
    quick = replace(RATES, flops_per_s=1e15)
    assert bytes_s < quick.model_s(Form.FORWARD, (1, side, 1, side)) < 1.3 * bytes_s


def test_one_tile_more_than_fits_takes_a_wave_more() -> None:
    """Four multiprocessors compute four tiles of 128 x 256 at once, and need twice as long for
    five; a result of other tiles cannot be faster than its FLOPs.
    """
    full = RATES.model_s(Form.FORWARD, (4, 128, 8192, 256))
    more = RATES.model_s(Form.FORWARD, (5, 128, 8192, 256))
    assert 1.25 * full < more <= 2 * full


@pytest.mark.parametrize("form", [Form.FORWARD, Form.INPUT, Form.WEIGHT])
def test_only_the_lengths_of_rows_in_memory_decide_on_alignment(form: Form) -> None:
    """From the layouts of Form: the rows of x (rows, inner) and of a result (rows, columns), of W
    (columns, inner) if it is transposed, of (inner, rows) if the first factor is.
    """
    lengths = {
        Form.FORWARD: ("inner", "inner", "columns"),
        Form.INPUT: ("inner", "columns", "columns"),
        Form.WEIGHT: ("rows", "columns", "columns"),
    }[form]
    for name in ("rows", "inner", "columns"):
        sides = dict.fromkeys(("rows", "inner", "columns"), 64) | {name: 65}
        kind = RATES.class_of(form, (1, *sides.values()))
        assert kind.is_aligned is (name not in lengths), name


@pytest.mark.parametrize("device_name", DEVICE_NAMES)
def test_tokens_that_are_no_multiple_of_8_cost_next_to_nothing(device_name: str) -> None:
    """Public tables of matmuls have 0.998 for one row less than a multiple of 8."""
    kernels = model(device_name, Precision.BF16)
    for inner, columns in ((1600, 6400), (6400, 1600), (2560, 10240)):
        whole, less = (
            kernels.time(Form.FORWARD, (1, rows, inner, columns)).time_s for rows in (4096, 4092)
        )
        assert 0.97 * whole < less <= whole


# more work


def drawn_shapes(chance: random.Random, form: Form, precision: Precision) -> tuple[Shape, Shape]:
    """A kernel, and one with more work: some sides longer, those that decide on alignment by whole
    multiples, because a side that is not aligned may be slower than a longer one that is.
    """
    multiple = 8 if precision is Precision.BF16 else 4
    if form in MATMULS_OF:
        context = chance.randint(16, 8000)
        heads, d_head = chance.randint(1, 256), chance.choice((32, 64, 80, 128))
        longer = context + chance.choice((0, 1, context))
        more_heads = heads + chance.choice((0, 1, heads))
        return (heads, context, d_head, context), (more_heads, longer, d_head, longer)
    batch = chance.choice((1, 1, chance.randint(2, 200)))
    sides = [round(2 ** chance.uniform(3, 12 if batch > 1 else 15)) for _ in range(3)]
    if chance.random() < 0.8:
        sides = [max(multiple, side // multiple * multiple) for side in sides]
    more = [
        side + chance.choice((0, 0, multiple * chance.randint(1, 64), multiple * side))
        for side in sides
    ]
    more_batches = batch if batch == 1 else batch + chance.choice((0, 1, batch))
    return (batch, *sides), (more_batches, *more)


def drawn_pairs(count: int) -> Iterator[tuple[str, Precision, Form, Shape, Shape]]:
    """Kernels of shipped devices, each with one that has more work."""
    chance = random.Random(62)
    for _ in range(count):
        form, precision = chance.choice(list(Form)), chance.choice(STEP_PRECISIONS)
        yield chance.choice(DEVICE_NAMES), precision, form, *drawn_shapes(chance, form, precision)


def test_no_kernel_with_more_work_is_foretold_faster() -> None:
    """Also next to kernels that were measured, whose times are noisy."""
    models: dict[tuple[str, Precision], KernelModel] = {}
    for device_name, precision, form, less, more in drawn_pairs(NUM_PAIRS):
        key = device_name, precision
        models.setdefault(key, model(*key))
        first, second = (models[key].time(form, shape) for shape in (less, more))
        assert first.time_s <= second.time_s * (1 + 1e-9), (key, form, less)


@pytest.mark.parametrize("device_name", DEVICE_NAMES)
def test_a_measured_kernel_is_not_slower_than_a_longer_one(device_name: str) -> None:
    for precision in STEP_PRECISIONS:
        kernels = model(device_name, precision)
        curves = SHIPPED.curves(device_name)
        assert curves is not None
        for measured in curves.matmuls[precision]:
            form, (batch, rows, inner, columns) = measured.form or Form.FORWARD, measured.shape
            longer = (batch, rows, inner * 2, columns)
            if form in MATMULS_OF:
                longer = (2 * batch, rows, inner, columns)
            first, second = (kernels.time(form, shape) for shape in (measured.shape, longer))
            assert first.time_s <= second.time_s, (precision, form, measured.shape)


def drawn_steps(chance: random.Random) -> tuple[RunConfig, RunConfig]:
    """A step, and one with a longer context, a larger batch, or a wider feed-forward network."""
    heads = chance.choice((4, 8, 16))
    small = replace(
        SIZES["small"],  # whose tape is shipped, for all widths
        context_length=8 * chance.randint(4, 256),
        d_model=64 * heads,
        d_ff=64 * chance.randint(2, 64),
        num_heads=heads,
        attention=chance.choice(list(Attention)),
    )
    model = replace(
        small,
        context_length=small.context_length * chance.choice((1, 2)) + 8 * chance.choice((0, 1)),
        d_ff=small.d_ff + 64 * chance.choice((0, 0, 1, 8)),
    )
    batch_size = chance.randint(2, 16)
    run = RunConfig(
        size="drawn",
        model=small,
        batch_size=batch_size,
        mode=chance.choice((Mode.TRAIN, Mode.INFERENCE)),
        precision=chance.choice(STEP_PRECISIONS),
        device=Device.CUDA,
    )
    more_batches = batch_size + chance.choice((0, 1, batch_size))
    return run, replace(run, model=model, batch_size=more_batches)


def test_no_step_with_more_work_is_foretold_faster() -> None:
    chance = random.Random(336)
    for _ in range(NUM_STEPS):
        curves = SHIPPED.curves(chance.choice(DEVICE_NAMES))
        assert curves is not None
        less, more = (step_time(run, curves) for run in drawn_steps(chance))
        assert less is not None
        assert more is not None
        assert sum(less.kernels_s.values()) <= sum(more.kernels_s.values()) * (1 + 1e-9)
        assert less.step_s <= more.step_s * (1 + 1e-9)
        assert less.low_s <= less.step_s <= less.high_s


def test_each_layer_takes_as_long_as_the_one_before() -> None:
    curves = SHIPPED.curves("H200")
    assert curves is not None
    run = RunConfig(size="small", model=SIZES["small"], batch_size=4, device=Device.CUDA)
    kernels_s = []
    for size in ("small", "medium", "large"):  # 12, 24 and 36 layers
        model = replace(run.model, num_layers=SIZES[size].num_layers)
        forecast = step_time(replace(run, size=size, model=model), curves)
        assert forecast is not None
        kernels_s.append(sum(forecast.kernels_s.values()))
    assert kernels_s[2] - kernels_s[1] == pytest.approx(kernels_s[1] - kernels_s[0])


def test_the_order_of_measurements_changes_nothing() -> None:
    curves = SHIPPED.curves("H200")
    assert curves is not None
    rates, measured = curves.rates(Precision.BF16), list(curves.matmuls[Precision.BF16])
    assert rates is not None
    kernels = KernelModel(rates, measured)
    random.Random(0).shuffle(measured)
    shuffled = KernelModel(rates, measured)
    for device_name, precision, form, shape, _ in drawn_pairs(100):
        if (device_name, precision) == ("H200", Precision.BF16):
            assert kernels.time(form, shape) == pytest.approx(shuffled.time(form, shape))


# other devices


def test_a_device_with_equal_rates_has_equal_times_and_twice_the_rates_halve_them() -> None:
    twice = replace(RATES, flops_per_s=2e12, bytes_per_s=2e12, kernel_s=5e-7)
    assert transferred([SMALL], RATES, RATES) == (SMALL,)
    (half,) = transferred([SMALL], RATES, twice)
    assert half.time_s == pytest.approx(SMALL.time_s / 2)


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.names[0])
def test_no_device_is_faster_than_its_data_sheet(device) -> None:
    """Nor slower than a third of it, in large matmuls and passes."""
    curves = data_sheet_curves(device)
    reference = find_device("H200")
    assert reference is not None
    for precision in STEP_PRECISIONS:
        peak = device.peak_flops_per_s.get(precision)
        time = curves.matmul_time(precision, 8192, 8192, 8192)
        assert (time is None) is (peak is None)
        if time is not None:
            assert peak / 3 < 2 * 8192**3 / time.time_s < peak
    bandwidth = 2**32 / curves.pass_s(2**32)
    assert device.memory_bandwidth_bytes_per_s / 3 < bandwidth
    assert bandwidth < device.memory_bandwidth_bytes_per_s
    assert prod((curves.multiprocessors, 1)) == device.multiprocessors
    assert not curves.is_measured
