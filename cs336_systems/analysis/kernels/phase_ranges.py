"""Which ranges of a trace stand for phases and steps, by their names."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain

import numpy as np

from ...ranges import PhaseNames
from ...text import command_line
from ..columns import NO_ROWS, Ints
from .known_ranges import (
    TORCH_OPTIMIZER,
    TORCH_ZERO_GRAD,
    is_piece,
    is_trainer_step,
    phase_named,
    server_step,
)
from .phases import PHASES, LaunchPhase
from .step_profile import StepLabel
from .trace import Trace

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
    pieces: Ints
    """Those of them around one module's part of a pass, of which a step has many."""
    of_torch: Ints
    """PyTorch's own ranges around the optimizer, unless the program has a range of its own
    there.
    """
    zero_grad: Ints
    """Those of them around `zero_grad`, which begin a step as often as they end it."""
    step: Ints
    is_of_torch: bool
    """The steps are those of torch.profiler or of a trainer, beside whose ranges PyTorch's own
    around an optimizer would be.
    """
    labels: Mapping[int, StepLabel]
    """What the names of a server's steps say, by their index."""
    warmup: Ints
    measure: Ints

    @property
    def structure(self) -> Ints:
        """Ranges that are no modules: phases but the loss, steps, and what is around them."""
        phases = [names for phase, names in self.phases.items() if phase is not LaunchPhase.LOSS]
        return np.concatenate([*phases, self.step, self.warmup, self.measure])


def phase_ranges(trace: Trace, names: PhaseNames) -> PhaseRanges:
    """Find the ranges that these names and patterns mean, in upper or lower case.

    Where the program has none of its own for a phase or a step, those of PyTorch, of trainers and
    of servers stand for it.
    """
    present = np.unique(trace.ranges.name)
    texts = [trace.strings[name] for name in present]

    def those(is_meant: Callable[[str], bool]) -> Ints:
        return present[np.array([is_meant(text) for text in texts], dtype=np.bool_)]

    of_program: dict[str, Ints] = {}
    for field, pattern in asdict(names).items():
        of_program[field] = those(partial(_means, pattern))
    phases = {}
    for phase in PHASES:
        phases[phase] = of_program.get(phase, NO_ROWS)
        if not len(phases[phase]):
            phases[phase] = those(partial(_is_known_as, phase))
    zero_grad = of_torch = NO_ROWS
    if not len(of_program["optimizer"]):
        zero_grad = those(lambda text: TORCH_ZERO_GRAD.match(text) is not None)
        steps = those(lambda text: TORCH_OPTIMIZER.match(text) is not None)
        of_torch = np.append(steps, zero_grad)
    labels = _server_steps(zip(present.tolist(), texts, strict=True))
    step = of_program["step"]
    is_of_torch = not len(step) and not labels
    # a caller who names the ranges of steps means no others
    if not len(step) and names.step == PhaseNames.step:
        step = np.array(list(labels), dtype=np.int64)
        if is_of_torch:
            step = those(is_trainer_step)
    return PhaseRanges(
        phases=phases,
        pieces=those(is_piece),
        of_torch=of_torch,
        zero_grad=zero_grad,
        step=step,
        is_of_torch=is_of_torch and len(step) > 0,
        labels=labels,
        warmup=of_program["warmup"],
        measure=of_program["measure"],
    )


def _server_steps(ranges: Iterable[tuple[int, str]]) -> dict[int, StepLabel]:
    """What those of the ranges say that are a server's steps, by the index of the name. `ranges`
    have the index and the text of each name.
    """
    labels = {}
    for name, text in ranges:
        label = server_step(text)
        if label is not None:
            labels[name] = label
    return labels


def _is_known_as(phase: LaunchPhase, text: str) -> bool:
    return phase_named(text) is phase


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
    words = chain.from_iterable((f"--{field}", name) for field, name in flags.items())
    return f"{listed}; try {command_line([*words])}"


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
