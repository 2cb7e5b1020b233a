import math
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cs336_systems.accounting import (
    attention_backward_flops,
    attention_forward_flops,
    count_parameters,
    forward_matmul_flops,
    mfu,
    step_flops,
)
from cs336_systems.config import SIZES, Arch, Mode, ModelConfig, Precision, RunConfig
from cs336_systems.model import TransformerLM

UNEQUAL = [
    ModelConfig(vocab_size=11, context_length=8, d_model=16, d_ff=24, num_layers=2, num_heads=4),
    ModelConfig(vocab_size=37, context_length=5, d_model=12, d_ff=7, num_layers=3, num_heads=2),
    ModelConfig(vocab_size=3, context_length=1, d_model=2, d_ff=1, num_layers=1, num_heads=1),
    ModelConfig(vocab_size=50, context_length=33, d_model=30, d_ff=100, num_layers=1, num_heads=3),
]


def run_config(model: ModelConfig, **changes) -> RunConfig:
    return RunConfig(size="custom", model=model, **changes)


@pytest.mark.parametrize("arch", Arch)
@pytest.mark.parametrize("shape", UNEQUAL, ids=lambda shape: f"d{shape.d_model}")
@pytest.mark.parametrize("batch_size", [1, 3])
def test_flops_are_those_that_torch_dispatches(arch, shape, batch_size) -> None:
    config = replace(shape, arch=arch)
    model = TransformerLM(config)
    tokens = torch.zeros(batch_size, config.context_length, dtype=torch.long)
    with FlopCounterMode(display=False) as forward:
        logits = model(tokens)
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    assert forward_matmul_flops(config, batch_size) == forward.get_total_flops()
    for mode in (Mode.INFERENCE, Mode.FORWARD):
        assert step_flops(run_config(config, batch_size=batch_size, mode=mode)) == forward.get_total_flops()
    whole = forward.get_total_flops() + backward.get_total_flops()
    for mode in (Mode.FORWARD_BACKWARD, Mode.TRAIN):
        assert step_flops(run_config(config, batch_size=batch_size, mode=mode)) == whole


@pytest.mark.parametrize("arch", Arch)
@pytest.mark.parametrize("shape", UNEQUAL, ids=lambda shape: f"d{shape.d_model}")
def test_products_of_attention_are_those_that_torch_dispatches(arch, shape) -> None:
    """Scores and values are the only products of batches of matrices (bmm): linear layers flatten the batch (mm)."""
    config, batch_size = replace(shape, arch=arch), 3
    model = TransformerLM(config)
    with FlopCounterMode(display=False) as forward:
        logits = model(torch.zeros(batch_size, config.context_length, dtype=torch.long))
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    for counter, flops in (
        (forward, attention_forward_flops(config, batch_size)),
        (backward, attention_backward_flops(config, batch_size)),
    ):
        assert flops.scores == flops.values
        assert flops.scores + flops.values == counter.get_flop_counts()["Global"][torch.ops.aten.bmm]


class Counted(float):
    """A number that counts the operations on it and its kind."""

    count = 0

    def _counted(self, value: float) -> "Counted":
        Counted.count += 1
        return Counted(value)

    def __add__(self, other):
        return self._counted(float(self) + float(other))

    def __sub__(self, other):
        return self._counted(float(self) - float(other))

    def __mul__(self, other):
        return self._counted(float(self) * float(other))

    def __truediv__(self, other):
        return self._counted(float(self) / float(other))

    def larger(self, other):
        return self._counted(max(float(self), float(other)))

    def exp(self):
        return self._counted(math.exp(self))


def test_softmax_counts_each_operation_of_its_definition() -> None:
    """A row at a time, as it is told, and the numbers are torch's."""
    model = UNEQUAL[1]
    rows = 3 * model.num_layers * model.num_heads * model.context_length
    scores = torch.randn(model.context_length, dtype=torch.float64, requires_grad=True)
    gradient = torch.randn(model.context_length, dtype=torch.float64)

    Counted.count = 0
    row, largest, total = [Counted(x) for x in scores.tolist()], Counted(-math.inf), Counted(0)
    for x in row:
        largest = largest.larger(x)
    powers = [(x - largest).exp() for x in row]
    for x in powers:
        total = total + x
    weights = [x / total for x in powers]
    assert attention_forward_flops(model, 3).softmax == rows * Counted.count

    Counted.count = 0
    dot = Counted(0)
    for x, g in zip(weights, gradient.tolist(), strict=True):
        dot = dot + x * g
    found = [(Counted(g) - dot) * x for x, g in zip(weights, gradient.tolist(), strict=True)]
    assert attention_backward_flops(model, 3).softmax == rows * Counted.count

    expected = scores.softmax(dim=0)
    expected.backward(gradient)
    torch.testing.assert_close(torch.tensor(weights, dtype=torch.float64), expected.detach())
    torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), scores.grad)


@pytest.mark.parametrize("config", [*SIZES.values(), *UNEQUAL, *(replace(shape, arch=Arch.GPT2) for shape in UNEQUAL)])
def test_parameters_are_those_that_torch_holds(config) -> None:
    with torch.device("meta"):
        model = TransformerLM(config)
    assert count_parameters(config) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("size", "parameters"),
    [("gpt2", 124_439_808), ("gpt2-medium", 354_823_168), ("gpt2-large", 774_030_080), ("gpt2-xl", 1_557_611_200)],
)
def test_gpt2_presets_hold_as_many_parameters_as_the_released_models(size, parameters) -> None:
    assert count_parameters(SIZES[size]) == parameters


@pytest.mark.parametrize(
    ("size", "billions"),
    [("small", 0.129), ("medium", 0.423), ("large", 0.969), ("xl", 2.00), ("2.7B", 3.41), ("10B", 12.8)],
)
def test_course_presets_hold_what_their_names_do_not_say(size, billions) -> None:
    assert count_parameters(SIZES[size]) / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize(
    ("size", "linear_tflops", "attention_tflops"),
    [
        ("small", 1.486, 0.116),
        ("medium", 5.073, 0.309),
        ("large", 11.753, 0.580),
        ("xl", 24.356, 0.966),
        ("2.7B", 41.546, 1.031),
    ],
)
def test_train_step_at_context_512_and_batch_4(size, linear_tflops, attention_tflops) -> None:
    """By hand; small: 6 x 2048 tokens x 120.9M weights, and 12 x 12 layers x 768 x 512 x 2048 tokens."""
    flops = step_flops(run_config(SIZES[size]))
    assert flops is not None
    assert flops / 1e12 == pytest.approx(linear_tflops + attention_tflops, abs=0.002)


@pytest.mark.parametrize("size", ["medium", "xl", "2.7B", "10B"])
def test_short_contexts_take_six_flops_per_parameter_and_token(size) -> None:
    """Of the parameters, only the embedding table and the norms multiply nothing."""
    model = replace(SIZES[size], context_length=16)
    flops = step_flops(run_config(model, batch_size=4))
    assert flops is not None
    multiplying = count_parameters(model) - model.vocab_size * model.d_model
    assert flops / (6 * multiplying * 4 * 16) == pytest.approx(1, rel=0.01)


def test_the_users_own_model_has_no_known_flops() -> None:
    assert step_flops(run_config(UNEQUAL[0], model_factory="package.module:factory")) is None


def test_mfu_is_relative_to_the_dense_peak() -> None:
    assert mfu(156e12, "NVIDIA A100-SXM4-80GB", Precision.BF16) == 0.5
    assert mfu(19.5e12, "NVIDIA A100-SXM4-80GB", Precision.FP32) == 1
    assert mfu(156e12, "NVIDIA A100-SXM4-80GB", Precision.TF32) == 1


def test_unknown_hardware_or_precision_has_no_mfu() -> None:
    assert mfu(1e12, "NVIDIA H20", Precision.BF16) is None
    assert mfu(1e12, "Tesla V100-SXM2-16GB", Precision.BF16) is None
    assert mfu(1e9, "Apple M3", Precision.FP32) is None
