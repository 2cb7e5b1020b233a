"""Which ranges of a trace stand for phases and steps, by their names."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase

import numpy as np

from ...ranges import PhaseNames
from ..columns import NO_ROWS, Ints
from .phases import LaunchPhase
from .trace import Trace

_TORCH_OPTIMIZER = "Optimizer.step#*"
_TORCH_ZERO_GRAD = "Optimizer.zero_grad#*"
_TORCH_STEP = "ProfilerStep#*"
"""PyTorch and torch.profiler write these ranges by themselves."""
_NUMBER = re.compile(r"(?<=[\s#_:-])\d+$")
_LIKELY = {
    "forward": re.compile(r"forward|fwd", re.I),
    "backward": re.compile(r"backward|bwd", re.I),
    "optimizer": re.compile(r"optim|\bopt\b|opt_step|adam|sgd", re.I),
    "step": re.compile(r"step|iter|batch", re.I),
}
"""What the names of others' ranges around phases look like, by the flag that would name them."""
MAX_NAMES = 12
"""Most names of ranges that a message lists."""


class RangeNameError(ValueError):
    """The file has no range of the name that the caller gave for a phase, or two phases have one
    name.
    """


@dataclass(frozen=True, kw_only=True)
class PhaseRanges:
    """Names of ranges that stand for phases and steps, as indices into the trace's strings."""

    phases: Mapping[LaunchPhase, Ints]
    of_torch: Ints
    """PyTorch's own ranges around the optimizer, unless the program has a range of its own
    there.
    """
    zero_grad: Ints
    """Those of them around `zero_grad`, which begin a step as often as they end it."""
    step: Ints
    warmup: Ints
    measure: Ints

    @property
    def structure(self) -> Ints:
        """Ranges that are no modules: phases but the loss, steps, and what is around them."""
        phases = [names for phase, names in self.phases.items() if phase is not LaunchPhase.LOSS]
        return np.concatenate([*phases, self.step, self.warmup, self.measure])


def phase_ranges(trace: Trace, names: PhaseNames) -> PhaseRanges:
    """Find the ranges that these names and patterns mean, in upper or lower case, or else
    PyTorch's own.
    """
    present = np.unique(trace.ranges.name)

    def meant_by(pattern: str) -> Ints:
        is_meant = [_means(pattern, trace.strings[name]) for name in present]
        return present[np.array(is_meant, dtype=np.bool_)]

    meant = {field: meant_by(pattern) for field, pattern in asdict(names).items()}
    zero_grad = of_torch = NO_ROWS
    if not len(meant["optimizer"]):
        zero_grad = meant_by(_TORCH_ZERO_GRAD)
        of_torch = np.append(meant_by(_TORCH_OPTIMIZER), zero_grad)
    if not len(meant["step"]) and names.step == PhaseNames.step:
        meant["step"] = meant_by(_TORCH_STEP)
    return PhaseRanges(
        phases={phase: meant.pop(phase) for phase in LaunchPhase if phase in meant},
        of_torch=of_torch,
        zero_grad=zero_grad,
        **meant,
    )


def _means(pattern: str, text: str) -> bool:
    """Whether the name or pattern means this text, in upper or lower case."""
    pattern, text = pattern.casefold(), text.casefold()
    return text == pattern or fnmatchcase(text, pattern)


def check_names(trace: Trace, names: PhaseNames) -> None:
    """Raise RangeNameError for a name of two phases, and for one that the caller chose and no range
    of the trace has.

    Default names need not occur, since a file may have no ranges at all.
    """
    given = asdict(names)
    if len({name.casefold() for name in given.values()}) < len(given):
        raise RangeNameError(
            f"each phase needs a range name of its own, got {', '.join(given.values())}"
        )
    present = [trace.strings[name] for name in np.unique(trace.ranges.name)]
    for field, name in given.items():
        is_default = name == getattr(PhaseNames, field)
        if not is_default and not any(_means(name, text) for text in present):
            raise RangeNameError(
                f"no range has the name {name!r} that was given for {field}; the names are: "
                f"{_listed(_by_time(trace))}"
            )


def advice(trace: Trace) -> str:
    """Which ranges there are, and the flags that would make phases of those whose names look
    like phases.
    """
    if not len(trace.ranges):
        return "record with ranges around the phases"
    names = _by_time(trace)
    flags: dict[str, str] = {}
    for field, pattern in _LIKELY.items():
        for name in names:
            if pattern.search(name) and name not in flags.values():
                flags[field] = name
                break
    listed = f"the ranges are, most time first: {_listed(names)}"
    if not flags:
        return listed
    words = " ".join(f"--{field} {shlex.quote(name)}" for field, name in flags.items())
    return f"{listed}; try {words}"


def _by_time(trace: Trace) -> list[str]:
    """Names of the ranges, the longest total time first; numbers at their ends are a star."""
    ranges = trace.ranges
    used, index = np.unique(ranges.name, return_inverse=True)
    time_ns = np.bincount(index, ranges.end_ns - ranges.start_ns, minlength=len(used))
    longest = used[np.argsort(-time_ns, kind="stable")]
    return list(dict.fromkeys(_NUMBER.sub("*", trace.strings[name]) for name in longest))


def _listed(names: Sequence[str]) -> str:
    if not names:
        return "none"
    more = ", ..." if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more
