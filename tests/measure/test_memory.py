"""The recorder's hooks on real steps of a CPU, where the allocator's counters are the only thing
that is made up.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cs336.analysis.memory.names import block_of_ranges, sighting_name
from cs336.analysis.memory.notes import MemoryNotes, Sighting, SightingKind, notes_path, read_notes
from cs336.config import Arch, Device, ModelConfig, OptimizerKind, Phase, Precision, RunConfig
from cs336.costs.accounting import count_parameters
from cs336.measure.clock import HostClock, ObservedClock
from cs336.measure.memory import CHECKPOINT, MemoryRecorder
from cs336.measure.step import TrainingStep
from cs336.model.annotate import Annotator, set_annotator
from tests.measure.allocator import make_up_allocator

LAYERS, BATCH, CONTEXT, D_MODEL = 5, 3, 10, 24


@pytest.fixture(autouse=True)
def allocator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    make_up_allocator(monkeypatch)
    set_annotator(Annotator.PATH)
    yield
    set_annotator(Annotator.NONE)


def make_step(arch: Arch = Arch.CS336, **options: Any) -> TrainingStep:
    model = ModelConfig(
        vocab_size=37,
        context_length=CONTEXT,
        d_model=D_MODEL,
        d_ff=28,
        num_layers=LAYERS,
        num_heads=3,
        arch=arch,
    )
    torch.manual_seed(0)
    return TrainingStep(
        RunConfig(size="custom", model=model, batch_size=BATCH, device=Device.CPU, **options)
    )


def record(step: TrainingStep, folder: Path, num_steps: int = 1) -> MemoryNotes:
    """The notes on the steps."""
    recorder = MemoryRecorder(step, step.config.device, step.config.checkpoint_blocks)
    with recorder.watching():
        for _ in range(num_steps):
            step(ObservedClock(HostClock(), recorder.mark))
    recorder.dump(folder / "snapshot.pickle")
    return read_notes(notes_path(folder / "snapshot.pickle"))


def is_input(sighting: Sighting) -> bool:
    return sighting.name.endswith(CHECKPOINT)


def in_blocks(notes: MemoryNotes) -> Counter[tuple[object, ...]]:
    """What the blocks save, without where it lies and when."""
    saved = (
        s
        for s in notes.sightings
        if s.kind in (SightingKind.SAVED, SightingKind.AUTOCAST_COPY) and not is_input(s)
    )
    return Counter(
        (sighting_name(s), s.kind, s.shape, s.dtype, s.num_bytes)
        for s in saved
        if s.kind is SightingKind.AUTOCAST_COPY or block_of_ranges(s.name) is not None
    )


@pytest.mark.parametrize("optimizer", [OptimizerKind.ADAMW, OptimizerKind.FOREACH])
@pytest.mark.parametrize("arch", Arch)
def test_parameters_gradients_and_moments_have_the_bytes_of_the_closed_form(
    arch: Arch, optimizer: OptimizerKind, tmp_path: Path
) -> None:
    step = make_step(arch, optimizer=optimizer)
    notes = record(step, tmp_path)
    sizes: dict[tuple[SightingKind, int], int] = {
        (s.kind, s.address): s.num_bytes for s in notes.sightings
    }
    sums = Counter[SightingKind]()
    for (kind, _), num_bytes in sizes.items():
        sums[kind] += num_bytes
    params = count_parameters(step.config.model)
    # steps done, in fp32
    counts = 4 * len(list(step.model.parameters())) if optimizer is OptimizerKind.FOREACH else 0
    assert (sums[SightingKind.PARAMETER], sums[SightingKind.OPTIMIZER_STATE]) == (
        4 * params,
        8 * params + counts,
    )
    gradients = [s for s in notes.sightings if s.kind is SightingKind.GRADIENT]
    assert sum(s.num_bytes for s in gradients) == 4 * params
    assert Counter(s.name for s in gradients) == Counter(
        name for name, _ in step.model.named_parameters()
    )


@pytest.mark.parametrize("blocks", [1, 2, 3, LAYERS])
@pytest.mark.parametrize(
    ("arch", "precision"), [(Arch.CS336, Precision.FP32), (Arch.GPT2, Precision.BF16)]
)
def test_a_checkpoint_keeps_its_input_and_backward_saves_what_forward_would(
    arch: Arch, precision: Precision, blocks: int, tmp_path: Path
) -> None:
    plain = record(make_step(arch, precision=precision), tmp_path)
    assert not any(is_input(s) for s in plain.sightings)

    step = make_step(arch, precision=precision, checkpoint_blocks=blocks)
    given: list[int] = []
    for block in step.model.layers[::blocks]:

        def keep(_block: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if step.phase is Phase.FORWARD:
                given.append(inputs[0].untyped_storage().data_ptr())

        block.register_forward_pre_hook(keep)
    notes = record(step, tmp_path)
    inputs = [s for s in notes.sightings if is_input(s)]
    assert [sighting_name(s) for s in inputs] == [
        f"block.{first} > {CHECKPOINT}" for first in range(0, LAYERS, blocks)
    ]
    assert [s.address for s in inputs] == given
    assert {(s.kind, s.shape, s.dtype) for s in inputs} == {
        (SightingKind.SAVED, (BATCH, CONTEXT, D_MODEL), "float32")
    }
    assert in_blocks(notes) == in_blocks(plain)

    ends = {mark.name: mark.position.allocations for mark in notes.marks}
    again = [
        s
        for s in notes.sightings
        if s.kind is SightingKind.SAVED and not is_input(s) and block_of_ranges(s.name) is not None
    ]
    assert all(ends["forward"] < s.position.allocations < ends["backward"] for s in again)
    assert all(s.position.allocations < ends["forward"] for s in inputs)
    unnamed = [s for s in notes.sightings if s.kind is SightingKind.SAVED and not sighting_name(s)]
    assert unnamed == [], "a checkpoint's inputs are sighted once, with the block that they are of"


@pytest.mark.parametrize("blocks", [0, 2])
def test_a_recorded_step_computes_the_same_and_leaves_no_hook_behind(
    blocks: int, tmp_path: Path
) -> None:
    alone, watched = make_step(checkpoint_blocks=blocks), make_step(checkpoint_blocks=blocks)
    alone(HostClock())
    record(watched, tmp_path)
    assert alone.model.state_dict().keys() == watched.model.state_dict().keys()
    for mine, other in zip(alone.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(mine, other), "updated once"
    step = watched
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in step.model.layers)


@pytest.mark.parametrize("index", range(4))
def test_a_block_that_fails_when_computed_again_leaves_no_hook_behind(
    index: int, tmp_path: Path
) -> None:
    step = make_step(checkpoint_blocks=4)

    def fail(_module: nn.Module, _inputs: tuple[Tensor, ...]) -> None:
        if step.phase is Phase.BACKWARD:
            raise torch.cuda.OutOfMemoryError("no memory left")

    step.model.layers[index].ffn.register_forward_pre_hook(fail)
    with pytest.raises(torch.cuda.OutOfMemoryError, match="no memory left"):
        record(step, tmp_path)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@pytest.mark.parametrize("split", [False, True], ids=["whole masters", "split masters"])
@pytest.mark.parametrize("arch", Arch)
def test_low_precision_copies_of_weights_are_no_parameters(
    arch: Arch, split: bool, tmp_path: Path
) -> None:
    step = make_step(
        arch,
        precision=Precision.BF16,
        optimizer=OptimizerKind.FUSED,
        cast_once=True,
        split_masters=split,
    )
    notes = record(step, tmp_path)
    found: Counter[tuple[SightingKind, str]] = Counter()
    for sighting in notes.sightings:
        if sighting.kind is not SightingKind.SAVED:
            found[sighting.kind, sighting.dtype] += sighting.num_bytes
    parameters = count_parameters(step.config.model)
    copied = sum(weight.shape.numel() for weight in step.model.weights if weight.copy is not None)
    embeddings = step.model.token_embeddings.weight.numel() if arch is Arch.GPT2 else 0
    halved = copied - embeddings if split else 0
    assert found[SightingKind.PARAMETER, "float32"] == 4 * (parameters - halved)
    assert found[SightingKind.PARAMETER, "int16"] == 2 * halved
    assert (
        found[SightingKind.AUTOCAST_COPY, "bfloat16"]
        == found[SightingKind.GRADIENT, "bfloat16"]
        == 2 * copied
    )
    # the tied weight has a gradient of each of its uses
    assert found[SightingKind.GRADIENT, "float32"] == 4 * (parameters - copied + embeddings)
    assert found[SightingKind.OPTIMIZER_STATE, "float32"] == 8 * parameters
    packed = " + ".join(f"layers.0.attn.{name}_proj.weight" for name in "qkv")
    assert packed in {s.name for s in notes.sightings if s.kind is SightingKind.AUTOCAST_COPY}
