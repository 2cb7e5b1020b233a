"""Record the CUDA allocator's history over steps, with notes that only the live process can take.

The snapshot is PyTorch's own format; the notes say which tensor was at which address
(analysis/memory/notes.py).
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from ..analysis.memory.notes import (
    START,
    Mark,
    MemoryNotes,
    Position,
    Sighting,
    SightingKind,
    notes_path,
    write_notes,
)
from ..config import Device, Phase
from ..model.annotate import current_path
from ..model.fast.master_adamw import MasterAdamW
from ..model.fast.model import FastLM
from ..model.fast.weights import Weight
from ..parallel.fully_sharded import FSDP
from ..ranges import Range
from .step import TrainingStep

MAX_EVENTS = 1_000_000
"""Events in the allocator's ring buffer, so that a long run takes at most some hundred MB of
host memory.
"""
CHECKPOINT = "checkpoint"
"""Last part of the name of a tensor that a checkpoint keeps, which is the input of its first
block.
"""


class MemoryRecorder:
    """Records the allocator of the current CUDA device, and the addresses of the tensors of a step.

    `step` is a `TrainingStep`, or has its `model`, `optimizer`, `optimizer_state`, `way` and
    `phase`. `checkpoint_blocks` is the number of blocks in a checkpoint; 0 without checkpoints.
    """

    def __init__(self, step: Any, device: Device, checkpoint_blocks: int = 0) -> None:  # noqa: ANN401
        """Prepare to record the memory of a training `step` on a device. `checkpoint_blocks` is the
        number of blocks in a checkpoint, 0 without.
        """
        self._step, self._device = step, device
        self._weights = list(_weights(step))
        self._known = {_address(weight): name for _, name, weight in self._weights}
        self._names = {id(weight.master): weight.name for weight in _updated_weights(step)}
        self._names |= {id(weight): name for _, name, weight in self._weights}
        self._checkpoint_blocks = checkpoint_blocks
        self._gathered: list[Tensor] = []
        """Tensors into which a fully sharded model gathers its whole parameters."""
        if isinstance(step.way, FSDP):
            self._gathered = step.way.watch_gathers(
                lambda unit, memory: self._see(SightingKind.GATHERED, unit, memory)
            )
        self._recomputing: list[saved_tensors_hooks] = []
        """Hooks of the blocks that backward is recomputing."""
        self.restart()

    def restart(self) -> None:
        """Record from here on, and drop what was recorded before."""
        self._marks: list[Mark] = []
        self._sightings: list[Sighting] = []
        self._step_number = -1
        torch.cuda.memory._record_memory_history(None)
        self._start = _position(_counters())
        # Without the stacks of frees, which nothing reads: PyTorch 2.11 loses an exception when it
        # takes one while the exception unwinds, and a checkpoint ends its second forward pass by an
        # exception.
        torch.cuda.memory._record_memory_history(
            "all", context="alloc", stacks="python", max_entries=MAX_EVENTS
        )
        self._see_all(self._weights)
        for name, buffer in self._step.model.named_buffers():
            self._see(SightingKind.BUFFER, name, buffer)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Context that notes the address of each tensor that autograd saves for backward, and
        leaves it unchanged.
        """
        with (
            saved_tensors_hooks(self._saved, lambda tensor: tensor),
            contextlib.ExitStack() as handles,
        ):
            for handle in self._watch_checkpoints():
                handles.callback(handle.remove)
            yield

    def mark(self, ended: Phase | None) -> None:
        """Mark the start of a step or the end of a phase; when the gradients are there, note
        their addresses too.
        """
        if ended is None:
            self._step_number += 1
        counters = _counters()
        self._marks.append(
            Mark(
                step=self._step_number,
                name=START if ended is None else ended,
                position=_position(counters),
                allocated_bytes=counters["allocated_bytes"]["all"]["current"],
                requested_bytes=counters["requested_bytes"]["all"]["current"],
                reserved_bytes=counters["reserved_bytes"]["all"]["current"],
                peak_allocated_bytes=counters["allocated_bytes"]["all"]["peak"],
            )
        )
        if ended == (Phase.BACKWARD if self._step.way is None else Phase.COMMUNICATION):
            gradients = [(name, weight.grad) for _, name, weight in self._weights]
            self._see_all(
                (SightingKind.GRADIENT, name, grad) for name, grad in gradients if grad is not None
            )

    def dump(self, path: Path) -> None:
        """Write the snapshot to `path` and the notes beside it, and stop recording."""
        for parameter, state in self._step.optimizer_state().items():
            name = self._names.get(id(parameter), "a tensor outside of the model")
            for key, value in state.items():
                if isinstance(value, Tensor):
                    self._see(SightingKind.OPTIMIZER_STATE, f"{key} of {name}", value)
        counters = _counters()
        temporary = path.with_name(f".{path.name}.tmp")
        torch.cuda.memory._dump_snapshot(str(temporary))
        torch.cuda.memory._record_memory_history(None)
        free, total = torch.cuda.mem_get_info()
        notes = MemoryNotes(
            device=torch.cuda.current_device(),
            start=self._start,
            end=_position(counters),
            marks=tuple(self._marks),
            sightings=tuple(self._sightings),
            reserved_bytes=counters["reserved_bytes"]["all"]["current"],
            used_on_device_bytes=total - free,
        )
        write_notes(notes, notes_path(path))
        temporary.replace(path)

    def _see_all(self, tensors: Iterable[tuple[SightingKind, str, Tensor]]) -> None:
        """Note what is at each address; tensors that share memory are noted as the first name
        and how many more.
        """
        at: dict[tuple[SightingKind, int], list[tuple[str, Tensor]]] = {}
        for kind, name, tensor in tensors:
            at.setdefault((kind, _address(tensor)), []).append((name, tensor))
        for (kind, _), ((name, tensor), *others) in at.items():
            self._see(kind, f"{name} and {len(others)} more" if others else name, tensor)

    def _see(self, kind: SightingKind, name: str, tensor: Tensor) -> None:
        """Note that `tensor` is at its present address, under this kind and name; do nothing if it
        has no memory on the device.
        """
        storage = tensor.untyped_storage()
        if tensor.device.type == self._device.value and storage.nbytes():
            self._sightings.append(
                Sighting(
                    kind=kind,
                    name=name,
                    address=storage.data_ptr(),
                    num_bytes=storage.nbytes(),
                    shape=tuple(tensor.shape),
                    dtype=str(tensor.dtype).removeprefix("torch."),
                    position=_position(_counters()),
                )
            )

    def _saved(self, tensor: Tensor) -> Tensor:
        """Note a tensor that autograd saves in forward; return what autograd keeps."""
        path = current_path()
        # a checkpoint's input, saved outside of all blocks, is noted by `_see_input` with the block
        # that reads it
        is_of_checkpoint = self._checkpoint_blocks and path[-1:] == (Range.FORWARD,)
        if not is_of_checkpoint:
            self._see_saved(tensor, *path)
        # an operator that saves its own output would otherwise be in a reference cycle
        return tensor.detach()

    def _see_saved(self, tensor: Tensor, *path: str) -> None:
        """Note a saved tensor by the ranges around it, or as a parameter's copy, unless it is a
        weight itself.
        """
        address = _address(tensor)
        is_gathered = any(address == _address(memory) for memory in self._gathered)
        if address not in self._known and not is_gathered:
            copied = self._copied_parameter(tensor.grad_fn)
            kind = SightingKind.SAVED if copied is None else SightingKind.AUTOCAST_COPY
            self._see(kind, " > ".join(path) if copied is None else copied, tensor)

    def _watch_checkpoints(self) -> Iterator[RemovableHandle]:
        """Hooks on the blocks: forward keeps only the inputs of checkpoints, backward saves what it
        recomputes.

        During recomputation the checkpoint's own hooks replace those of `watching`, so these hooks
        wrap them.
        """
        model = self._step.model
        if not self._checkpoint_blocks:
            return
        for index, block in enumerate(cast("FastLM", model).layers):
            if index % self._checkpoint_blocks == 0:
                yield block.register_forward_pre_hook(self._see_input)
            yield block.register_forward_pre_hook(self._begin_recomputation)
            # a checkpoint ends by an exception
            yield block.register_forward_hook(self._end_recomputation, always_call=True)

    def _see_input(self, _block: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Note what a checkpoint keeps in forward: the input of its first block."""
        if self._step.phase is Phase.FORWARD and torch.is_grad_enabled():
            kept = inputs[0] if isinstance(inputs[0], tuple) else inputs[:1]
            for tensor in kept:
                if tensor is not None:
                    self._see_saved(tensor, *current_path(), CHECKPOINT)

    def _begin_recomputation(self, _block: nn.Module, _inputs: tuple[Any, ...]) -> None:
        """If backward calls the block, wrap the checkpoint's own hooks: each saved tensor is noted
        before they get it.
        """
        if self._step.phase is Phase.BACKWARD:
            pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(True)
            hooks = saved_tensors_hooks(functools.partial(self._saved_again, pack), unpack)
            hooks.__enter__()
            self._recomputing.append(hooks)

    def _end_recomputation(
        self, _block: nn.Module, _inputs: tuple[Any, ...], _output: object
    ) -> None:
        """Remove the hooks that `_begin_recomputation` set, if it did."""
        if self._recomputing:
            self._recomputing.pop().__exit__()

    def _saved_again(self, pack: Callable[[Tensor], object], tensor: Tensor) -> object:
        """Note a tensor that a recomputed block saves, and give it to the checkpoint's hook."""
        self._see_saved(tensor, *current_path())
        return pack(tensor)

    def _copied_parameter(self, node: Node | None) -> str | None:
        """Name of the parameter that `node` copied to another type, possibly through views; None
        for other tensors.
        """
        while node is not None and not hasattr(node, "variable"):
            if node.name().removesuffix("0") not in (
                "ToCopyBackward",
                "TBackward",
                "TransposeBackward",
            ):
                return None
            node = node.next_functions[0][0]
        variable: Tensor | None = getattr(node, "variable", None)
        return None if variable is None else self._known.get(_address(variable))


def _weights(step: TrainingStep) -> Iterator[tuple[SightingKind, str, Tensor]]:
    """What is trained, by name, and low-precision copies if the model computes with such copies."""
    weights: dict[int, tuple[SightingKind, list[str], Tensor]] = {}

    def note(kind: SightingKind, name: str, tensor: Tensor) -> None:
        """Add a name to the tensor; a tensor that is used twice has several names."""
        # a model on several ranks may have freed masters of which this rank keeps a part
        if tensor.numel():
            weights.setdefault(id(tensor), (kind, [], tensor))[1].append(name)

    for name, parameter in step.model.named_parameters():
        note(SightingKind.PARAMETER, name, parameter)
    for weight in _updated_weights(step):
        if id(weight.master) not in weights:
            note(SightingKind.PARAMETER, weight.name, weight.master)
        if weight.remainder is not None:
            note(SightingKind.PARAMETER, weight.name, weight.remainder)
        if weight.copy is not None:
            note(SightingKind.AUTOCAST_COPY, weight.name, weight.copy.leaf)
    for kind, names, tensor in weights.values():
        yield kind, " + ".join(names), tensor


def _updated_weights(step: TrainingStep) -> Sequence[Weight]:
    """The weights of the fast model; on several ranks those that this rank updates."""
    if isinstance(step.optimizer, MasterAdamW):
        return step.optimizer.weights
    return step.model.weights if isinstance(step.model, FastLM) else ()


def _address(tensor: Tensor) -> int:
    """Address at which the tensor's storage begins."""
    return tensor.untyped_storage().data_ptr()


def _counters() -> dict[str, Any]:
    """The counters of PyTorch's caching allocator on the current GPU."""
    return torch.cuda.memory_stats_as_nested_dict()


def _position(counters: dict[str, Any]) -> Position:
    """How many blocks have been allocated and freed so far: the place in the allocator's history of
    events.
    """
    counts = counters["allocation"]["all"]
    return Position(allocations=counts["allocated"], frees=counts["freed"])
