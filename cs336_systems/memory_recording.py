"""Record what the CUDA allocator does in a step, and beside it what only the live process knows.

The snapshot is PyTorch's own, for its viewer and ours; the notes say what lay where (analysis/memory_notes.py).
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, saved_tensors_hooks

from cs336_systems.analysis.memory.notes import Kind, Mark, MemoryNotes, Position, Sighting, notes_path, write_notes
from cs336_systems.clock import Clock, StepTimes
from cs336_systems.config import Phase
from cs336_systems.profiling import current_path
from cs336_systems.step import TrainingStep

MAX_EVENTS = 1_000_000
"""Events that the allocator keeps: a ring, so that a long run costs at most some hundred MB of host memory."""
START = "start"


class MemoryRecorder:
    """Watches the allocator of the current CUDA device and the tensors of one `TrainingStep`."""

    def __init__(self, step: TrainingStep) -> None:
        self._step = step
        self._parameters = dict(step.model.named_parameters())
        self._known = {p.untyped_storage().data_ptr(): name for name, p in self._parameters.items()}
        self._begin()

    def _begin(self) -> None:
        self._marks: list[Mark] = []
        self._sightings: list[Sighting] = []
        self._num_steps = 0
        torch.cuda.memory._record_memory_history(None)
        self._start = _position(_counters())
        torch.cuda.memory._record_memory_history("all", context="all", stacks="python", max_entries=MAX_EVENTS)
        for name, parameter in self._parameters.items():
            self._see(Kind.PARAMETER, name, parameter)
        for name, buffer in self._step.model.named_buffers():
            self._see(Kind.BUFFER, name, buffer)

    def restart(self) -> None:
        """Forget what was recorded: the measured steps begin."""
        self._begin()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """While open, what autograd saves for backward is sighted. The tensors saved stay what they are."""
        with saved_tensors_hooks(self._saved, lambda tensor: tensor):
            yield

    def clock(self, inner: Clock) -> Clock:
        """The clock, with a mark at the end of every phase."""
        return _MarkingClock(inner, self)

    def mark(self, name: str) -> None:
        """A phase ends here; after backward, the gradients are sighted too."""
        counters = _counters()
        self._marks.append(
            Mark(
                step=self._num_steps,
                name=name,
                position=_position(counters),
                allocated_bytes=counters["allocated_bytes"]["all"]["current"],
                requested_bytes=counters["requested_bytes"]["all"]["current"],
                reserved_bytes=counters["reserved_bytes"]["all"]["current"],
                peak_allocated_bytes=counters["allocated_bytes"]["all"]["peak"],
            )
        )
        if name == Phase.BACKWARD:
            for parameter_name, parameter in self._parameters.items():
                if parameter.grad is not None:
                    self._see(Kind.GRADIENT, parameter_name, parameter.grad)

    def end_step(self) -> None:
        """The next mark belongs to the next step."""
        self._num_steps += 1

    def dump(self, path: Path) -> None:
        """Write the snapshot to `path` and the notes beside it, and stop recording."""
        self._see_optimizer_state()
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

    def _see(self, kind: Kind, name: str, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if tensor.is_cuda and storage.nbytes():
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

    def _see_optimizer_state(self) -> None:
        optimizer = self._step.optimizer
        if optimizer is None:
            return
        names: dict[Tensor, str] = {parameter: name for name, parameter in self._parameters.items()}
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    self._see(Kind.OPTIMIZER_STATE, f"{key} of {names[parameter]}", value)

    def _saved(self, tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in self._known:
            copied = self._copied_parameter(tensor.grad_fn)
            kind = Kind.SAVED if copied is None else Kind.AUTOCAST_COPY
            self._see(kind, " > ".join(current_path()) if copied is None else copied, tensor)
        return tensor.detach()  # the tensor itself would be a cycle where an operator saves its own output

    def _copied_parameter(self, node: Node | None) -> str | None:
        """Name of the parameter of which `node` made a copy in another type, or a view of such; None for others."""
        while node is not None and not hasattr(node, "variable"):
            if node.name().removesuffix("0") not in ("ToCopyBackward", "TBackward", "TransposeBackward"):
                return None
            node = node.next_functions[0][0]
        variable: Tensor | None = getattr(node, "variable", None)
        return None if variable is None else self._known.get(variable.untyped_storage().data_ptr())


class _MarkingClock:
    def __init__(self, inner: Clock, recorder: MemoryRecorder) -> None:
        self._inner, self._recorder = inner, recorder

    def start(self) -> None:
        self._inner.start()
        self._recorder.mark(START)

    def lap(self, phase: Phase) -> None:
        self._inner.lap(phase)
        self._recorder.mark(phase)

    def stop(self) -> StepTimes:
        times = self._inner.stop()
        self._recorder.end_step()
        return times


def _counters() -> dict[str, Any]:
    return torch.cuda.memory_stats_as_nested_dict()


def _position(counters: dict[str, Any]) -> Position:
    counts = counters["allocation"]["all"]
    return Position(allocations=counts["allocated"], frees=counts["freed"])
