"""A delay is found in the phase it was put into, on a CPU, on a device that lags behind, and on
a GPU.
"""

import time
from collections.abc import Callable

import pytest

from cs336.config import Phase
from cs336.measure.clock import Clock, EventClock, HostClock, StepTimes
from tests.conftest import HostTime

DELAY_S = 0.05
PHASES = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)


def timed(clock: Clock, slow: Phase | None, delay: Callable[[], None]) -> StepTimes:
    """One step whose phases do nothing, but for the slow one."""
    clock.start()
    for phase in PHASES:
        if phase is slow:
            delay()
        clock.lap(phase)
    return clock.stop()


def test_the_step_is_as_long_as_another_clock_says() -> None:
    clock = HostClock()
    clock.start()
    start = time.monotonic()
    time.sleep(DELAY_S)
    elapsed = time.monotonic() - start
    assert clock.stop().step_s >= elapsed
    start = time.monotonic()
    times = timed(clock, Phase.FORWARD, lambda: time.sleep(DELAY_S))
    assert times.step_s <= time.monotonic() - start


class LaggingDevice:
    """Takes work at once and does it later, like a GPU: `synchronize` waits for the end of it."""

    def __init__(self, host_time: HostTime) -> None:
        self.host_time = host_time
        self.free_at_ns = 0

    def launch(self, work_s: float) -> None:
        self.free_at_ns = max(self.free_at_ns, self.host_time.now_ns) + round(work_s * 1e9)

    def synchronize(self) -> None:
        self.host_time.now_ns = max(self.host_time.now_ns, self.free_at_ns)


@pytest.mark.parametrize("slow", PHASES)
def test_with_synchronisation_work_that_was_only_launched_is_found_in_its_phase(
    slow: Phase, host_time: HostTime
) -> None:
    device = LaggingDevice(host_time)
    times = timed(HostClock(device.synchronize), slow, lambda: device.launch(DELAY_S))
    assert times.phases_s == {phase: DELAY_S if phase is slow else 0.0 for phase in PHASES}


def test_a_step_starts_when_earlier_work_is_done(host_time: HostTime) -> None:
    device = LaggingDevice(host_time)
    device.launch(DELAY_S)
    assert timed(HostClock(device.synchronize), None, lambda: None).step_s == 0
    assert host_time.now_ns == round(DELAY_S * 1e9)


class EventOf:
    """An event of the lagging device."""

    def __init__(self, device: LaggingDevice) -> None:
        self.device = device

    def record(self) -> None:
        self.device.launch(0)
        self.at_ns = self.device.free_at_ns

    def elapsed_time(self, end: "EventOf") -> float:
        return (end.at_ns - self.at_ns) / 1e6


@pytest.mark.parametrize("late", PHASES)
def test_events_tell_where_the_device_works_and_the_host_where_it_launches(
    late: Phase, host_time: HostTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host launches a long kernel in data, which the device ends while the host sleeps in
    the late phase.
    """
    device = LaggingDevice(host_time)
    monkeypatch.setattr("torch.cuda.synchronize", device.synchronize)
    monkeypatch.setattr("torch.cuda.Event", lambda enable_timing: EventOf(device))
    clock = EventClock()
    for _ in range(2):
        clock.start()
        for phase in PHASES:
            if phase is Phase.DATA:
                device.launch(DELAY_S)
            if phase is late:
                host_time.sleep(3 * DELAY_S)
            clock.lap(phase)
        times = clock.stop()
    assert times.host_phases_s == pytest.approx(
        {phase: 3 * DELAY_S if phase is late else 0.0 for phase in PHASES}
    )
    on_device = dict.fromkeys(PHASES, 0.0) | {Phase.DATA: DELAY_S, late: 2 * DELAY_S}
    assert times.phases_s == pytest.approx(
        on_device | ({Phase.DATA: 3 * DELAY_S} if late is Phase.DATA else {})
    )
    assert times.step_s == times.host_s == pytest.approx(3 * DELAY_S)


@pytest.mark.gpu
@pytest.mark.alone
def test_events_on_the_stream_do_not_slow_a_step() -> None:
    """Of a step that the device bounds, events time the phases without making it longer;
    synchronising does so.
    """
    import torch

    def step(clock: Clock) -> float:
        clock.start()
        for phase in PHASES:
            for _ in range(50):
                torch.cuda._sleep(20_000)
            clock.lap(phase)
        return clock.stop().step_s

    with_events, synchronised = (
        min(step(clock) for _ in range(20))
        for clock in (EventClock(), HostClock(torch.cuda.synchronize))
    )
    bare = min(_bare_step() for _ in range(20))
    assert with_events == pytest.approx(bare, rel=0.02)
    assert synchronised > with_events


def _bare_step() -> float:
    import torch

    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(50 * len(PHASES)):
        torch.cuda._sleep(20_000)
    torch.cuda.synchronize()
    return time.perf_counter() - start
