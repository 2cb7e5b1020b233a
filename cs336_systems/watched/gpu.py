"""Counters of the GPU that a watched loop uses."""

import contextlib

import pynvml
import torch

from ..measure.gpm import ActivityMonitor
from ..measure.nvml import Gpu, GpuMonitor, visible_gpus
from ..measure.step import memory_since, reset_memory
from ..record import Activity, GpuState, Memory, Telemetry
from .observer import Observer


class LoopGpu(Observer):
    """The counters of the GPU that this process uses: its allocator's, and those of the driver's
    library.
    """

    def __init__(self, *, counts_activity: bool) -> None:
        uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
        self.gpu: Gpu | None = next((gpu for gpu in visible_gpus() if gpu.uuid == uuid), None)
        self._monitor = GpuMonitor(uuid) if self.gpu else None
        self._activity = ActivityMonitor(self.gpu.uuid if self.gpu and counts_activity else None)
        self._states: list[GpuState] = []
        self._before = torch.cuda.memory_stats()

    def step_begins(self, number: int) -> None:
        """Before measured step `number` (from 0): start to count at the first, and read the
        GPU's state at some.
        """
        if number == 0:
            self._before = reset_memory()
            self._activity.between_steps()
        # a reading takes milliseconds of the CPU, so they become rarer: steps 0, 8, 16, 32, ...
        if self._monitor is not None and (
            number == 0 or (number >= 8 and number & (number - 1) == 0)
        ):
            with contextlib.suppress(pynvml.NVMLError):
                self._states.append(self._monitor.state())

    def step_ended(self, number: int) -> None:
        """Read the counters of the GPU's units after some measured steps."""
        if number >= 0:
            self._activity.between_steps()

    def throttled_s(self) -> dict[str, float]:
        """For how long each reason has lowered the clock, by the driver's counters; empty without
        its library.
        """
        return self._monitor.throttled_s() if self._monitor is not None else {}

    def activity(self) -> Activity | None:
        """How busy the units were up to the last reading."""
        return self._activity.activity()

    def telemetry(self) -> Telemetry | None:
        """The first and the last reading."""
        return Telemetry(before=self._states[0], after=self._states[-1]) if self._states else None

    def memory(self) -> Memory:
        """What PyTorch's allocator did since the first measured step."""
        return memory_since(self._before)
