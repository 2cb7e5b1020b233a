"""A step does what its mode says, and training is the same training as PyTorch's own."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from cs336.config import (
    CompileMode,
    Device,
    Mode,
    ModelConfig,
    OptimizerKind,
    Phase,
    Precision,
    RunConfig,
)
from cs336.measure.clock import HostClock
from cs336.measure.step import TrainingStep
from cs336.model.transformer import TransformerLM
from cs336.model.user_code import call_factory
from tests.conftest import HostTime
from tests.model.fast.steps import EPS, OF_AN_UPDATE, of_losses, roundings, with_smooth_updates
from tests.rounding import of_chain, of_walk

MODEL = ModelConfig(vocab_size=11, context_length=8, d_model=8, d_ff=12, num_layers=2, num_heads=2)
CONFIG = RunConfig(size="custom", model=MODEL, batch_size=3)
LOW = {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16, Precision.TF32: torch.float16}
"""Types of low precisions; TF32 has as many bits as fp16."""


def run(
    config: RunConfig, model: nn.Module | None = None, steps: int = 1
) -> tuple[TrainingStep, list[float]]:
    torch.manual_seed(config.seed)
    step, clock = TrainingStep(config, model), HostClock()
    return step, [step(clock)[1].item() for _ in range(steps)]


def parameters(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


class Seen(nn.Module):
    """A model that remembers in what state each of its forward passes found the world."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.states: list[tuple[bool, bool, bool]] = []
        self.has_gradients: list[bool] = []

    def forward(self, tokens: Tensor) -> Tensor:
        self.states.append(
            (torch.is_grad_enabled(), self.training, torch.is_autocast_enabled("cpu"))
        )
        self.has_gradients.append(
            any(parameter.grad is not None for parameter in self.model.parameters())
        )
        return self.model(tokens)


@pytest.mark.parametrize("mode", Mode)
def test_a_mode_is_what_its_name_says(mode: Mode) -> None:
    config = replace(CONFIG, mode=mode)
    model = Seen(TransformerLM(MODEL))
    before = parameters(model)
    step = TrainingStep(config, model)
    losses: list[Tensor] = []
    forward = step.forward
    step.forward = lambda batch: losses.append(forward(batch)) or losses[-1]
    for _ in range(3):
        times, _ = step(HostClock())
        assert tuple(times.phases_s) == config.phases
    with_graph = mode is not Mode.INFERENCE
    assert [loss.requires_grad for loss in losses] == [with_graph] * 3
    assert model.states == [(with_graph, with_graph, False)] * 3
    assert model.has_gradients == [False] * 3, "every step starts without gradients"
    assert all(parameter.grad is None for parameter in model.parameters()), "and leaves none"
    assert same(before, parameters(model)) == (mode is not Mode.TRAIN)
    assert (step.optimizer is not None) == (mode is Mode.TRAIN)


def hand_written_training(
    model: nn.Module, batch: tuple[Tensor, Tensor], precision: Precision, steps: int
) -> list[float]:
    """The loop of a textbook: PyTorch's AdamW, autocast around the model and the loss."""
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=1e-3,
        betas=(0.9, 0.95),
        eps=EPS,
        weight_decay=0.01,
        foreach=False,
        fused=False,
    )
    losses = []
    for _ in range(steps):
        low = precision is Precision.BF16
        with torch.autocast("cpu", dtype=torch.bfloat16) if low else nullcontext():
            logits = model(batch[0])
            loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch[1].reshape(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
@pytest.mark.parametrize(
    "optimizer", [kind for kind in OptimizerKind if kind is not OptimizerKind.OWN]
)
def test_training_is_the_textbook_s_loop_with_pytorch_s_adamw(
    optimizer: OptimizerKind, precision: Precision
) -> None:
    config = replace(CONFIG, optimizer=optimizer, precision=precision)
    torch.manual_seed(1)
    model = TransformerLM(MODEL)
    twin, start = copy.deepcopy(model), parameters(model)
    step = with_smooth_updates(TrainingStep(config, model))
    losses = [step(HostClock())[1].item() for _ in range(3)]
    expected = hand_written_training(twin, step.batches(), precision, steps=3)
    dtype = LOW.get(precision, torch.float32)
    assert losses == pytest.approx(expected, abs=of_losses(config, dtype))
    for mine, theirs, first in zip(parameters(model), parameters(twin), start, strict=True):
        allowed = of_chain(torch.float32, 3 * OF_AN_UPDATE) * theirs.norm()
        allowed += of_walk(dtype, 2 * roundings(MODEL)) * (theirs - first).norm()
        assert (mine - theirs).norm() < allowed
    assert losses[2] < losses[0], "on one batch over and over, the loss falls"


def test_fp16_scales_the_loss_and_undoes_it() -> None:
    """Without unscaling, AdamW (whose updates do not depend on the scale) would still differ
    through its eps.
    """
    gradients: list[float] = []
    model = TransformerLM(MODEL)
    model.lm_head.weight.register_hook(
        lambda gradient: gradients.append(gradient.abs().max().item())
    )
    step, _ = run(replace(CONFIG, precision=Precision.FP16), model)
    step.scaler = None
    step(HostClock())
    scaled, plain = gradients
    assert scaled / plain == pytest.approx(65536, rel=0.5)
    assert TrainingStep(CONFIG).loss_scale() is None


def test_a_sleep_is_found_in_the_phase_it_was_put_into(host_time: HostTime) -> None:
    delay_s = 0.05

    def sleep(*_: object) -> None:
        host_time.sleep(delay_s)

    def timed(put: Callable[[TrainingStep], object]) -> dict[Phase, float]:
        """Times of a step's phases, where nothing takes time but a sleep."""
        step = TrainingStep(CONFIG)
        step(HostClock())
        put(step)
        return step(HostClock())[0].phases_s

    found = {
        Phase.FORWARD: timed(lambda step: step.model.register_forward_hook(sleep)),
        Phase.BACKWARD: timed(lambda step: next(step.model.parameters()).register_hook(sleep)),
        Phase.OPTIMIZER: timed(lambda step: step.optimizer.register_step_post_hook(sleep)),
    }
    for phase, times in found.items():
        assert times == {other: delay_s if other is phase else 0.0 for other in CONFIG.phases}


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.FP16])
def test_the_end_of_the_graph_is_a_part_of_backward(
    host_time: HostTime, precision: Precision
) -> None:
    """On a GPU it takes milliseconds of the host, which would be in the step and in none of its
    phases.
    """

    class SlowToEnd:
        def __del__(self) -> None:
            host_time.sleep(0.05)

    step = TrainingStep(replace(CONFIG, precision=precision))
    step(HostClock())

    def slow(_module, _inputs, output):
        output.grad_fn.metadata.update(slow=SlowToEnd())

    step.model.register_forward_hook(slow)
    times, _ = step(HostClock())
    assert times.phases_s[Phase.BACKWARD] == times.step_s == 0.05


# A user's own model


def test_a_factory_is_called_with_what_its_signature_names() -> None:
    seen = {}

    def named(vocab_size: int, rope_theta: float, width: int = 3) -> nn.Module:
        seen.update(vocab_size=vocab_size, rope_theta=rope_theta, width=width)
        return nn.Identity()

    call_factory(named, replace(MODEL, rope_theta=7.0))
    assert seen == {"vocab_size": 11, "rope_theta": 7.0, "width": 3}

    def everything(**others: object) -> nn.Module:
        assert not others
        return nn.Identity()

    call_factory(everything, MODEL)
    call_factory(lambda *nothing: nn.Identity(), MODEL)


# Compiled


@pytest.fixture
def compiled_eagerly(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """torch.compile without its slow last stage: what is compiled, and when, stays the same."""
    modes: list[object] = []
    compile_model = torch.compile

    def compile_without_inductor(model: nn.Module, *, mode: str | None) -> object:
        modes.append(mode)
        return compile_model(model, backend="eager")

    monkeypatch.setattr(torch, "compile", compile_without_inductor)
    return modes


@pytest.mark.parametrize(
    ("mode", "passed"),
    [
        (CompileMode.DEFAULT, None),
        (CompileMode.REDUCE_OVERHEAD, "reduce-overhead"),
        (CompileMode.MAX_AUTOTUNE_NO_CUDAGRAPHS, "max-autotune-no-cudagraphs"),
    ],
)
def test_a_compiled_step_trains_the_same(
    compiled_eagerly: list[object], mode: CompileMode, passed: str | None
) -> None:
    # This project's own model is checked for shapes here, which the compiler cannot trace.
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 11))
    twin = copy.deepcopy(model)
    _, losses = run(replace(CONFIG, compile=mode), model, steps=3)
    _, expected = run(CONFIG, twin, steps=3)
    assert compiled_eagerly == [passed]
    assert losses == pytest.approx(expected, rel=1e-5)
    for mine, theirs in zip(parameters(model), parameters(twin), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", Precision)
def test_training_on_a_gpu_is_training_on_a_cpu(precision: Precision) -> None:
    torch.manual_seed(1)
    model = TransformerLM(MODEL)
    twin = copy.deepcopy(model).cuda()
    _, expected = run(CONFIG, model, steps=3)
    _, losses = run(replace(CONFIG, device=Device.CUDA, precision=precision), twin, steps=3)
    assert losses == pytest.approx(
        expected, abs=of_losses(CONFIG, LOW.get(precision, torch.float32))
    )
