"""What the counters of devices showed while phases ran: how active tensor cores, memory and links
were.
"""

from collections.abc import Iterator

import numpy as np
import pandas as pd

from ..columns import Ints, chosen, groups
from .device_time import DeviceWindows
from .modules import RangeParts
from .phases import PHASES
from .step_profile import CounterMean
from .trace import Nesting, Trace

MIN_SAMPLES = 10
"""Fewest samples for a mean: a phase with fewer is not seen."""


def counter_means(trace: Trace, windows: DeviceWindows, devices: Ints) -> Iterator[CounterMean]:
    """The mean of each counter over the steps and over each phase, on these devices.

    A sample is the mean over the time since the one before it, and counts where that time lies
    within a step, or within a phase of it.
    """
    samples = chosen(trace.samples, np.isin(trace.samples.device, devices))
    first, last = windows.at(samples.start_ns), windows.at(samples.end_ns - 1)
    step, phase = np.append(windows.step, -1), np.append(windows.phase, -1)
    in_step = (first >= 0) & (step[first] == step[last])
    in_phase = np.where(first == last, phase[first], -1)
    for name, rows in groups(samples.counter):
        for code, kind in enumerate((*PHASES, None)):
            is_inside = in_step[rows] if kind is None else in_phase[rows] == code
            values = samples.value[rows[is_inside]]
            if len(values) >= MIN_SAMPLES:
                yield CounterMean(
                    counter=trace.strings[name],
                    phase=kind,
                    count=len(values),
                    share=float(values.mean()) / 100,
                )


def module_means(trace: Trace, kernels: pd.DataFrame, parts: RangeParts) -> Iterator[CounterMean]:
    """The mean of each counter over samples that begin and end in kernels of one module, without
    kernels of another between them.
    """
    samples = chosen(trace.samples, np.isin(trace.samples.device, kernels["device"]))
    kernels = kernels.sort_values("start_ns", kind="stable")
    start, path = kernels["start_ns"].to_numpy(), parts.path[kernels["module"]]
    run = np.cumsum(np.diff(path, prepend=-1) != 0)
    nesting = Nesting(start, start + kernels["duration_ns"].to_numpy())
    first, last = nesting.at(samples.start_ns), nesting.at(samples.end_ns - 1)
    is_one = (first >= 0) & (np.append(run, -1)[first] == np.append(run, -2)[last])
    of_sample = np.where(is_one, np.append(path, 0)[first], 0)
    for number, rows in groups(of_sample):
        for name, values in groups(samples.counter[rows]):
            if number and len(values) >= MIN_SAMPLES:
                yield CounterMean(
                    counter=trace.strings[name],
                    phase=None,
                    count=len(values),
                    share=float(samples.value[rows][values].mean()) / 100,
                    module=parts.names(number),
                )
