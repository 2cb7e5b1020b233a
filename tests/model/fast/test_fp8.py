"""Linear layers in fp8: against casts by hand and matmuls in fp64, and as part of a step."""

from dataclasses import replace

import pytest
import torch

from cs336.config import Arch, Attention, ModelConfig, OptimizerKind, Phase, Precision, RunConfig
from cs336.measure.step import TrainingStep
from cs336.model.fast import fp8
from tests.model.fast.steps import gradients
from tests.operators import Calls
from tests.rounding import of_chain, of_sum, of_walk

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MODEL = ModelConfig(
    vocab_size=37, context_length=16, d_model=32, d_ff=48, num_layers=3, num_heads=4
)
RUN = RunConfig(
    size="custom",
    model=MODEL,
    batch_size=4,
    precision=Precision.BF16,
    optimizer=OptimizerKind.FUSED,
    cast_once=True,
    learning_rate=2e-4,
    pad_vocabulary=8,
)
SELECTIVE = {"checkpoint_blocks": 1, "selective_checkpoints": True}


def factors(device="cpu", rows=48, d_in=80, d_out=112):
    """x, the weight, the bias and the gradient of the result, of unlike sizes."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((rows, d_in), (d_out, d_in), (d_out,), (rows, d_out))
    sizes = (3.0, 0.02, 1.0, 1e-6)
    made = (
        size * torch.randn(shape, generator=generator)
        for shape, size in zip(shapes, sizes, strict=True)
    )
    return tuple(tensor.to(device, torch.bfloat16) for tensor in made)


def fp8_linear(x, weight, bias=None):
    return fp8.fp8_linear(x, weight, bias)[0]


def results(layer, x, weight, bias, gradient):
    """What the layer returns, and the gradients of x, the weight and, where there is one, the
    bias.
    """
    leaves = [leaf.clone().requires_grad_() for leaf in (x, weight, bias) if leaf is not None]
    result = layer(*leaves)
    return (result.detach(), *torch.autograd.grad(result, leaves, gradient))


def by_hand(x):
    """x rounded to e4m3 in units of 1/448 of its largest element, in fp64: 3 bits of mantissa,
    exponents from -6 up.
    """
    unit = x.abs().max().float() / 448
    scaled = (x.float() * (1 / unit)).double()
    exponents = scaled.abs().log2().floor().clamp(min=-6)
    step = 2 ** (exponents - 3)
    return (scaled / step).round() * step * unit.double()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_matmuls_are_those_of_factors_rounded_by_hand(device, has_bias):
    x, weight, bias, gradient = factors(device)
    actual = results(fp8_linear, x, weight, bias if has_bias else None, gradient)
    a, b, g = by_hand(x), by_hand(weight), by_hand(gradient)
    factor_pairs = ((a, b.t()), (g, b), (g.t(), a))
    for result, (left, right), added in zip(
        actual, factor_pairs, (bias if has_bias else 0, 0, 0), strict=False
    ):
        expected = left @ right + added
        # rounded to bf16 at the end; a GPU keeps at least 13 bits of partial sums
        of_sums = 2**-12 if device == "cuda" else of_walk(torch.float32, len(right))
        allowed = of_chain(torch.bfloat16, 2) * expected.abs() + of_sums * (
            left.abs() @ right.abs()
        )
        assert result.dtype is torch.bfloat16
        assert ((result.double() - expected).abs() <= allowed).all()
    if has_bias:
        wide, of_sums = gradient.double(), of_sum(torch.float32, len(gradient))
        allowed = of_chain(torch.bfloat16, 2) * wide.sum(dim=0).abs() + of_sums * wide.abs().sum(
            dim=0
        )
        assert ((actual[3].double() - wide.sum(dim=0)).abs() <= allowed).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("up", "down"), [(90, -90), (120, -90), (-60, 60), (0, 0)])
def test_the_size_of_a_factor_costs_no_precision(device, up, down):
    """Powers of two change units and nothing else, up to the largest that bf16 holds."""
    x, weight, _, gradient = factors(device)
    expected = results(fp8_linear, x, weight, None, gradient)
    result = results(fp8_linear, x * 2.0**up, weight * 2.0**down, None, gradient)
    for mine, wanted, power in zip(result, expected, (up + down, down, up), strict=True):
        assert torch.equal(mine, wanted * 2.0**power)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("index", [0, 1, 3], ids=["x", "weight", "gradient"])
def test_zeros_and_next_to_nothing_stay_so(device, index):
    for size in (0.0, 1e-38):
        made = list(factors(device))
        made[index] = torch.full_like(made[index], size)
        x, weight, _, gradient = made
        actual = results(fp8_linear, x, weight, None, gradient)
        touched = [
            result
            for result, reads in zip(actual, ((0, 1), (3, 1), (3, 0)), strict=True)
            if index in reads
        ]
        assert len(touched) == 2
        assert all(result.abs().max() < 1e-30 for result in touched)
        assert all(
            result.isfinite().all() and result.any()
            for result in actual
            if all(result is not t for t in touched)
        )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(16, 16), (64, 128), (80, 304)], ids=str)
def test_a_cast_and_its_transpose_are_what_pytorch_rounds_to(shape, dtype, device):
    """Of elements from 2^-20 of the largest up to that; a matrix with gaps between its rows too."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(shape[0], 2 * shape[1], generator=generator)
    whole = (whole * 2.0 ** torch.randint(-20, 1, whole.shape, generator=generator)).to(
        device, dtype
    )
    for x in (whole[:, : shape[1]], whole[:, : shape[1]].contiguous()):
        unit = fp8.scale_of(x.abs())
        expected = (x.float() * unit.reciprocal()).to(torch.float8_e4m3fn).float()
        cast, transpose = fp8._fp8_casts(x, unit, True)
        assert cast.is_contiguous()
        assert transpose.is_contiguous()
        assert torch.equal(cast.float(), expected)
        assert torch.equal(transpose.float(), expected.t())
        assert torch.equal(fp8._fp8_casts(x, unit, False)[0].float(), expected)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_is_not_hidden(bad):
    x, weight, _, _ = factors()
    x[3, 5] = bad
    assert not fp8_linear(x, weight).isfinite().any()


def test_any_strides_and_leading_axes():
    x, weight, bias, gradient = factors()
    expected = results(fp8_linear, x, weight, bias, gradient)
    batches = x.view(3, 16, -1).transpose(1, 2).contiguous().transpose(1, 2)
    result = results(
        fp8_linear, batches, weight, bias, gradient.t().contiguous().t().view(3, 16, -1)
    )
    for mine, wanted in zip(result, expected, strict=True):
        assert torch.equal(mine.view(wanted.shape), wanted)
    same = torch.ones((), dtype=torch.bfloat16).expand(48, 112)
    broadcast = results(fp8_linear, x, weight, bias, same)
    assert all(map(torch.equal, broadcast, results(fp8_linear, x, weight, bias, same.contiguous())))


# In a step


def of(arch, **changes):
    return replace(RUN, model=replace(MODEL, arch=arch), **changes)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("checkpoints", ["none", "blocks", "selective"])
@pytest.mark.parametrize("arch", list(Arch))
def test_units_that_kernels_hand_on_are_those_of_the_tensors(
    arch, checkpoints, device, monkeypatch
):
    """Of four activations of a block only what attention returns is read once more for its unit,
    and no gradient.
    """
    settings = {"none": {}, "blocks": {"checkpoint_blocks": 2}, "selective": SELECTIVE}[checkpoints]
    model = replace(MODEL, arch=arch, attention=Attention.SDPA)
    step = TrainingStep(
        replace(RUN, model=model, fp8=True, fused_blocks=True, device=device, **settings)
    )
    read = []

    def checked(x, unit, transposes):
        torch.testing.assert_close(
            unit, x.abs().max().float() / 448, rtol=of_chain(torch.float32, 4), atol=0
        )
        assert unit.shape == ()
        return casts(x, unit, transposes)

    casts, largest_of_rows = fp8._fp8_casts, fp8._largest_of_rows
    monkeypatch.setattr(fp8, "_fp8_casts", checked)
    monkeypatch.setattr(fp8, "_largest_of_rows", lambda x: (read.append(x), largest_of_rows(x))[1])
    for _ in range(2):  # with other weights the second time
        read.clear()
        loss = step.forward(step.batches())
        # of what a selective checkpoint adds up for itself the norm is its own too
        assert len(read) == (1 + (checkpoints == "selective")) * MODEL.num_layers
        read.clear()
        step.backward(loss)
        if checkpoints == "none":
            assert not read
        step.update()


@pytest.mark.parametrize("arch", list(Arch))
def test_gradients_of_micro_batches_add_up(arch):
    """Each micro-batch has scales of its own, and halving a loss halves them: its gradients are to
    the bit half of those that it has alone.
    """
    run = of(arch, fp8=True, fused_blocks=True, batch_size=2)
    step = TrainingStep(replace(run, accumulate_steps=2))
    batches = [step.batches() for _ in range(2)]
    alone = []
    for batch in batches:
        step.backward(step.forward(batch) / 2)
        alone.append(gradients(step))
        step.model.zero_grad(set_to_none=True)
    phases = step._phases([tensor for batch in batches for tensor in batch])
    done = [next(phases) for _ in range(4)]
    assert done == 2 * [Phase.FORWARD, Phase.BACKWARD]
    together = gradients(step)
    for name, gradient in together.items():
        rounding = of_chain(torch.bfloat16, 1) * gradient.abs().max()
        assert gradient.any(), name
        assert (gradient - alone[0][name] - alone[1][name]).abs().max() <= rounding, name


@pytest.mark.parametrize("arch", list(Arch))
def test_all_matmuls_of_the_blocks_and_no_others_are_in_fp8(arch, fp8_products_of_a_gpu):
    """One for q, k and v, one for the output, two of the feed-forward network; the head's three
    stay in bf16.
    """
    step = TrainingStep(of(arch, fp8=True))
    with Calls() as calls:
        step.backward(step.forward(step.batches()))
    assert calls.counts["_scaled_mm"] == 3 * 4 * MODEL.num_layers
    assert calls.counts["mm"] + calls.counts["addmm"] == 3
