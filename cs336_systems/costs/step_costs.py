"""What a step of a user's model costs, module by module, as numbers that can be kept and compared
with those of another version of the code.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from ..config import Phase
from ..files import FileError, encode_json, read_json, write_atomically
from ..torch_needed import torch_version
from .memory import allocated_levels, rounded_bytes
from .tape import Category, Tape, phases_of
from .time import CONVOLUTIONS, flops_of

Costs = dict[str, dict[str, int]]
"""By quantity, the amount of each part: a module, and what it is in it (`part_name`)."""
FORMAT_VERSION = 1
HELD = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATE)
"""Categories of tensors that are named after these, and not after the operators that made them."""


def part_name(module: str, what: str) -> str:
    """The name of a part; `module_of` gives the module back."""
    return f"{module}: {what}"


def module_of(part: str) -> str:
    """The module of a part."""
    return part.rpartition(": ")[0]


def step_costs(tape: Tape) -> Costs:
    """The costs of the last step of a tape that knows its modules.

    - `peak_bytes`: of tensors that are asked for, each rounded up as the allocator does it, without
      what the allocator cannot split off, which depends on where blocks happen to lie.
    - `saved_bytes`: what forward passes leave for backward, all of the step together.
    - `made_bytes`: all that operations allocate.
    - `held_bytes`: what is there when a step begins.
    - `kept_bytes`, `kept_nodes`: how much more there is from step to step, of tensors and of nodes
      of autograd.
    - `flops`: those of matmuls; `recomputed_flops` are those among them that checkpoints run again.
    - `operations`: those that the host dispatches, views left out.
    """
    tensors = _Tensors(tape)
    _, start, _ = tape.steps[-1][0]
    end = len(tape.events)
    levels = allocated_levels(tape, [rounded_bytes(size) for size in tensors.sizes_bytes])
    peak = max(range(start, end + 1), key=levels.__getitem__)
    saved = Counter[str]()
    for first, stop in _forward_passes(tape):
        saved += tensors.together(tensors.left(first, stop))
    held, after = (tensors.together(tensors.left(0, place)) for place in (start, end))
    made = [event for event in tape.events[start:end] if event >= 0]
    return {
        "peak_bytes": dict(tensors.together(tensors.left(0, peak))),
        "saved_bytes": dict(saved),
        "made_bytes": dict(tensors.together(made)),
        "held_bytes": dict(held),
        "kept_bytes": _growth(held, after),
        "kept_nodes": _growth(*map(_nodes, tape.graphs[-2:])),
        **_launched(tape),
    }


def _forward_passes(tape: Tape) -> Iterator[tuple[int, int]]:
    """From where to where the events of each forward pass of the last step go: until backward, or
    where none follows, until its last model has returned.
    """
    begin: int | None = None
    returned = 0
    for phase, (first, stop), _ in phases_of(tape, -1):
        if phase is Phase.FORWARD:
            returned = stop if begin is None else first
            begin = first if begin is None else begin
            continue
        if begin is not None:
            yield begin, first if phase is Phase.BACKWARD else returned
        begin = None


def _growth(before: Counter[str], after: Counter[str]) -> dict[str, int]:
    """What a step leaves more than the step before it."""
    growth = Counter(after)
    growth.subtract(before)
    return {part: amount for part, amount in growth.items() if amount}


def _nodes(counts: Mapping[str, int]) -> Counter[str]:
    """Nodes of autograd by part."""
    return Counter({part_name(_shown(path, "loss"), "graph"): counts[path] for path in counts})


class _Tensors:
    """The tensors of a tape by their handles: of which part, and how large."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self.sizes_bytes = [spec.size_bytes for spec in map(tape.spec, range(len(tape.tensors)))]
        phases = _phase_of_events(tape)
        self._names = [
            self._name(handle, phases[place])
            for place, handle in enumerate(tape.events)
            if handle >= 0
        ]

    def _name(self, handle: int, phase: str) -> str:
        spec, owner = self._tape.spec(handle), self._tape.owners[handle]
        what = spec.label.partition(" in ")[0].partition(" of ")[0]
        if spec.category in HELD:
            what = spec.category.value
        *_, element_bytes = spec.formula.split()
        return part_name(_shown(owner, phase), f"{what} in {element_bytes}-byte elements")

    def left(self, first: int, stop: int) -> list[int]:
        """The tensors that are made between two events and not freed before the second."""
        events = self._tape.events[first:stop]
        freed = {~event for event in events if event < 0}
        return [event for event in events if event >= 0 and event not in freed]

    def together(self, handles: Iterable[int]) -> Counter[str]:
        """Bytes of these tensors by part."""
        parts = Counter[str]()
        for handle in handles:
            parts[self._names[handle]] += self.sizes_bytes[handle]
        return parts


def _phase_of_events(tape: Tape) -> list[str]:
    """The phase of each event."""
    names = ["before the steps"] * len(tape.events)
    for number in range(len(tape.steps)):
        for phase, (first, stop), _ in phases_of(tape, number):
            names[first:stop] = [phase.value] * (stop - first)
    return names


def _shown(path: str | None, phase: str) -> str:
    """The module in words; outside of modules the phase."""
    if path is None:
        return f"({phase})"
    return path or "the model itself"


def _launched(tape: Tape) -> Costs:
    """Operations that the last step dispatches, and their FLOPs."""
    counts: Mapping[str, Counter[str]] = {
        name: Counter() for name in ("flops", "recomputed_flops", "operations")
    }
    again = set(tape.again)
    for phase, _, (first, stop) in phases_of(tape, -1):
        for place in range(first, stop):
            operation = tape.operations[tape.launches[place]]
            part = part_name(_shown(tape.places[place], phase.value), operation.kind.value)
            counts["operations"][part] += operation.calls
            if flops := flops_of(operation):
                counts["flops"][part] += flops
                if place in again:
                    counts["recomputed_flops"][part] += flops
    return {name: dict(parts) for name, parts in counts.items()}


class CostsError(FileError):
    """A file of kept costs that cannot be read."""


class KeptCosts(msgspec.Struct, kw_only=True):
    """The content of a file of kept costs."""

    format_version: int = FORMAT_VERSION
    torch: str | None = None
    """Version of PyTorch that dispatched the operations."""
    steps: dict[str, Costs] = {}
    """By the names of steps."""


def read_costs(path: Path) -> KeptCosts:
    """What `write_costs` wrote; nothing if there is no file. Raise CostsError for a file that is
    damaged.
    """
    if not path.exists():
        return KeptCosts()
    what = "costs of training steps"
    return read_json(path, KeptCosts, what, version=FORMAT_VERSION, error=CostsError)


def write_costs(path: Path, kept: KeptCosts, steps: Mapping[str, Costs]) -> None:
    """Keep the costs of these steps by name, beside others that were `kept` before."""
    versions = [torch_version() or ""]
    if kept.steps.keys() - steps.keys():  # those stay as another PyTorch may have traced them
        versions = [*(kept.torch or "").split(" or "), *versions]
    together = kept.steps | {**steps}
    ordered = {name: together[name] for name in sorted(together)}
    torch = " or ".join(dict.fromkeys(filter(None, versions))) or None
    write_atomically(path, encode_json(KeptCosts(torch=torch, steps=ordered)))


def has_uncounted_flops(costs: Costs) -> bool:
    """Whether the step has matmuls whose FLOPs are not counted."""
    operators = {part.rpartition(": ")[2].partition(" in ")[0] for part in costs["made_bytes"]}
    return not operators.isdisjoint(CONVOLUTIONS)
