"""What a training program launches while autograd does not record: evaluation, generation, the
forward of a teacher, an update that is written out.

PyTorch numbers the operators that autograd records. Without ranges of forward, the time before a
backward would be forward whatever the program did there.
"""

import re
from dataclasses import dataclass

import numpy as np

from ..columns import Columns, Ints, Mask, chosen, runs
from .classes import classify_kernel
from .phase_plan import COMPUTING, MarkedWindows, launched_alone, windows_of
from .phases import LaunchPhase
from .trace import Trace

LEAST_SHARE = 0.5
"""Least number of matmuls, convolutions and attentions of a stretch without gradients, relative to
those with gradients before the same backward, by which it is a pass of its own. Forward computes
the angles of rotary embeddings, by a matmul, without gradients.
"""
_MADE = r"arange|empty|eye|fill|full|linspace|ones|rand|tri|zero"
_DRAWN = r"(?:bernoulli_|cauchy_|exponential_|geometric_|log_normal_|normal_?|random_|uniform_)$"
MAKING = re.compile(rf"^\w+::(?:{_MADE}|{_DRAWN})|^(?!\w+::)")
"""Operators that make a tensor from none, as forward makes positions and masks, and a program a
batch: PyTorch never numbers those, nor what they call. What has no namespace is a mark of
torch.compile.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launches(Columns):
    """Launches of the main thread by operators, in no window, in order of time."""

    time_ns: Ints
    window: Ints
    """How many windows begin before the launch."""
    backward: Ints
    """The number of the backward that follows."""
    is_recorded: Mask
    computes: Mask
    """The kernel is a matmul, a convolution or an attention."""
    works: Mask
    """The operator changes or computes what was there."""


def computed_without_gradients(trace: Trace, windows: MarkedWindows, main: int) -> MarkedWindows:
    """The stretches before each backward in which the main thread launched without gradients: all
    before the first operator that autograd recorded, and later ones that compute much.

    None where no operator before the backward was recorded, as where the file does not say it.
    """
    backward = windows.start_ns[windows.among(LaunchPhase.BACKWARD)]
    launches = _launches(trace, windows, main, backward)
    launches = chosen(launches, launches.backward < len(backward))
    first, last = _stretches(launches)
    is_apart = _is_leading(launches, first, last) | _computes_much(launches, first, last)
    time = launches.time_ns
    return windows_of(LaunchPhase.UNATTRIBUTED, time[first[is_apart]], time[last[is_apart]] + 1)


def _launches(trace: Trace, windows: MarkedWindows, main: int, backward: Ints) -> _Launches:
    kernels, operators = launched_alone(trace), trace.operators
    operator = operators.by_thread().at(kernels.thread, kernels.launch_ns)
    is_free = (operator >= 0) & ~windows.cover(kernels.launch_ns)
    kernels = chosen(kernels, is_free & (kernels.thread == main))
    kernels = chosen(kernels, np.argsort(kernels.launch_ns, kind="stable"))
    time = kernels.launch_ns
    recorded = chosen(operators, operators.is_recorded & (operators.thread == main))
    is_making = trace.named(operators, MAKING.search) & (operators.thread == main)
    return _Launches(
        time_ns=time,
        window=np.searchsorted(windows.start_ns, time),
        backward=np.searchsorted(backward, time),
        is_recorded=recorded.cover(time),
        computes=trace.named(kernels, lambda name: classify_kernel(name) in COMPUTING),
        works=~chosen(operators, is_making).cover(time),
    )


def _stretches(launches: _Launches) -> tuple[Ints, Ints]:
    """The first and the last launch of each stretch without gradients, between two windows."""
    kind = 2 * launches.window + launches.is_recorded
    first, last = runs(kind)
    is_plain = ~launches.is_recorded[first]
    return first[is_plain], last[is_plain]


def _is_leading(launches: _Launches, first: Ints, last: Ints) -> Mask:
    """Whether each stretch comes before all that autograd recorded for its backward, and works."""
    of_backward, position = np.unique(launches.backward[launches.is_recorded], return_index=True)
    first_recorded = np.full(launches.backward.max(initial=0) + 1, -1)
    first_recorded[of_backward] = np.flatnonzero(launches.is_recorded)[position]
    works = _number(launches.works | launches.computes, first, last) > 0
    return works & (first < first_recorded[launches.backward[first]])


def _computes_much(launches: _Launches, first: Ints, last: Ints) -> Mask:
    """Whether each stretch is a pass of its own, by how much is computed with gradients."""
    is_computed = launches.is_recorded & launches.computes
    size = int(launches.backward.max(initial=0)) + 1
    with_gradients = np.bincount(launches.backward[is_computed], minlength=size)
    of_stretch = with_gradients[launches.backward[first]]
    is_much: Mask = _number(launches.computes, first, last) >= LEAST_SHARE * of_stretch
    return is_much & (of_stretch > 0)


def _number(is_counted: Mask, first: Ints, last: Ints) -> Ints:
    """How many of the launches count in each stretch."""
    before = np.append(0, np.cumsum(is_counted))
    number: Ints = before[last + 1] - before[first]
    return number
