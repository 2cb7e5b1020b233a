"""Weights that are updated while backward goes on; the oracle updates them all after it."""

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cs336_systems.config import Arch, Attention, ModelConfig, OptimizerKind, Precision, RunConfig
from cs336_systems.measure.clock import HostClock
from cs336_systems.measure.step import TrainingStep
from cs336_systems.model.fast.backward_adamw import BackwardAdamW
from cs336_systems.model.fast.weights import Weight
from cs336_systems.model.transformer import TransformerLM

MODEL = ModelConfig(vocab_size=37, context_length=16, d_model=32, d_ff=48, num_layers=3, num_heads=4)
MODELS = {"cs336": MODEL, "tied": replace(MODEL, arch=Arch.GPT2), "odd": replace(MODEL, d_model=6, num_heads=1)}
"""One with tied weights and biases, and one whose q, k and v are not packed."""


def config_of(name: str, **settings: object) -> RunConfig:
    model = replace(MODELS[name], attention=Attention.SDPA)
    config = RunConfig(
        size="custom", model=model, batch_size=3, precision=Precision.BF16, optimizer=OptimizerKind.FUSED,
        learning_rate=1e-3, cast_once=True,
    )  # fmt: skip
    return replace(config, **settings)  # type: ignore[arg-type]


def make(name: str) -> TransformerLM:
    torch.manual_seed(0)
    return TransformerLM(config_of(name).model)


def updating(
    config: RunConfig, model: TransformerLM, bucket_elements: int, moments: torch.dtype = torch.float32
) -> TrainingStep:
    """The step, with an optimizer that no configuration for a CPU has."""
    step = TrainingStep(config, model)
    step.optimizer = BackwardAdamW(step.model.weights, config.learning_rate, bucket_elements, moments=moments)
    return step


def state_of(step: TrainingStep) -> dict[str, Tensor]:
    """Masters, copies and moments of all weights."""
    assert step.optimizer is not None
    found: dict[str, Tensor] = {}
    for number, weight in enumerate(step.model.weights):
        moments = {f"{number} {name}": value for name, value in step.optimizer.state[weight.master].items()}
        found |= {f"{number} master": weight.values(), **moments}
        if weight.copy is not None:
            found[f"{number} copy"] = weight.copy.values
    return found


@pytest.mark.parametrize("name", MODELS)
def test_moments_may_be_in_bf16(name: str) -> None:
    """Which changes the matrices, but by less than 1 %."""
    config = config_of(name)
    steps = [updating(config, make(name), 5000, dtype) for dtype in (torch.float32, torch.bfloat16)]
    for step in steps:
        for _ in range(3):
            step(HostClock())
    expected, found = map(state_of, steps)
    for key, whole in expected.items():
        assert found[key].dtype is (torch.bfloat16 if "exp_avg" in key else whole.dtype)
        if key.endswith("master") and whole.ndim > 1:
            assert 0 < (found[key] - whole).norm() < 0.01 * whole.norm()


@pytest.mark.parametrize(
    "settings", [{}, {"fused_blocks": True, "fused_loss": True, "split_masters": True}, {"checkpoint_blocks": 1}]
)
@pytest.mark.parametrize("bucket_elements", [1, 5000, 10**9])
@pytest.mark.parametrize("name", MODELS)
def test_training_is_the_same_to_the_last_bit(name: str, bucket_elements: int, settings: dict[str, object]) -> None:
    config, model = config_of(name, **settings), make(name)
    plain, mine = TrainingStep(config, copy.deepcopy(model)), updating(config, model, bucket_elements)
    for _ in range(4):
        assert mine(HostClock())[1].item() == plain(HostClock())[1].item()
    expected, found = state_of(plain), state_of(mine)
    assert found.keys() == expected.keys()
    assert not [key for key, value in found.items() if not torch.equal(value, expected[key])]


@pytest.mark.parametrize("name", MODELS)
def test_late_layers_are_updated_before_backward_reaches_the_first(name: str) -> None:
    """And when backward ends nothing is left to update."""
    step = updating(config_of(name), make(name), bucket_elements=1)
    step(HostClock())
    before = {key: value.detach().clone() for key, value in step.model.named_parameters()}
    changed_early: set[str] = set()

    def look(_gradient: Tensor) -> None:
        changed_early.update(key for key, value in step.model.named_parameters() if not torch.equal(value, before[key]))

    loss = step.forward(step.batches())
    first = step.model.layers[0].attn.output_proj.copies.weight
    first.register_hook(look)  # on the gradient, before it is added to the leaf's
    step.backward(loss)
    assert {"layers.2.ffn.w2.weight", "layers.1.ffn.w2.weight", "ln_final.weight"} <= changed_early
    later = ("layers.0.attn.q_proj", "layers.0.ln1", "token_embeddings")
    assert not any(key.startswith(later) for key in changed_early)
    after = state_of(step)
    kept = {key: value.clone() for key, value in after.items()}
    step.update()
    assert all(torch.equal(value, kept[key]) for key, value in state_of(step).items())
    assert not any(weight.gradients() for weight in step.model.weights)


@pytest.mark.parametrize("in_backward", [False, True])
def test_frozen_weights_and_no_others_stay_as_they_are(in_backward: bool) -> None:
    """One without a copy, one beside trained ones in a packed copy, and one whose copy is its own."""
    model = make("cs336")
    names = ["token_embeddings.weight", "layers.1.attn.q_proj.weight", "layers.2.ffn.w2.weight"]
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    step = (
        updating(config_of("cs336"), model, bucket_elements=1)
        if in_backward
        else TrainingStep(config_of("cs336"), model)
    )
    before = {key: value.clone() for key, value in state_of(step).items()}
    for _ in range(3):
        step(HostClock())
    parameters = [name for name, _ in step.model.named_parameters()]
    same = {key for key, value in state_of(step).items() if key in before and torch.equal(value, before[key])}
    assert same == {key for key in before if parameters[int(key.split()[0])] in names}


class Stream:
    """A stream of a simulated GPU, which knows what its next kernel may read."""

    def __init__(self) -> None:
        self.done: set[tuple[str, int]] = set()
        """What was done before the next kernel: a gradient made, or a master updated, by the id of its tensor."""

    def wait_stream(self, other: "Stream") -> None:
        self.done |= other.done


def test_updates_wait_for_their_gradients_and_the_next_step_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    step = TrainingStep(config_of("tied"), make("tied"))
    main, current = Stream(), [Stream()]
    for leaf in {id(place.leaf): place.leaf for each in step.model.weights for place in each.places}.values():
        leaf.register_post_accumulate_grad_hook(lambda leaf: main.done.add(("made", id(leaf))))
    optimizer = step.optimizer = BackwardAdamW(step.model.weights, bucket_elements=1)
    step(HostClock())

    @contextlib.contextmanager
    def use(stream: Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    update, updated = optimizer._update, []

    def checked(weights: Sequence[Weight], bucket: int) -> None:
        for weight in weights:
            gradients = {("made", id(place.leaf)) for place in weight.places if place.leaf.grad is not None}
            assert gradients <= current[-1].done
            updated.append(("updated", id(weight.master)))
            current[-1].done.add(updated[-1])
        update(weights, bucket)

    current[:] = [main]
    monkeypatch.setattr(optimizer, "_stream", Stream())
    monkeypatch.setattr(optimizer, "_update", checked)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", use)
    for _ in range(2):
        main.done.clear()
        updated.clear()
        step(HostClock())
        assert sorted(updated) == sorted(("updated", id(weight.master)) for weight in step.model.weights)
        assert set(updated) <= main.done


def test_gradients_of_two_batches_are_not_added_up() -> None:
    step = updating(config_of("cs336"), make("cs336"), bucket_elements=1)
    step(HostClock())
    step.backward(step.forward(step.batches()))
    with pytest.raises(RuntimeError, match="backward came twice"):
        step.backward(step.forward(step.batches()))


@pytest.mark.parametrize("bucket_elements", [1, 10**9])
def test_a_missing_gradient_is_found(bucket_elements: int) -> None:
    """The last block is frozen after the first step, or was until then."""
    for frozen_first in (False, True):
        step = updating(config_of("cs336"), make("cs336"), bucket_elements)
        leaf = step.model.layers[-1].ffn.w2.copies.weight
        leaf.requires_grad_(not frozen_first)
        step(HostClock())
        leaf.requires_grad_(frozen_first)
        with pytest.raises(RuntimeError, match="other gradients"):
            step(HostClock())
