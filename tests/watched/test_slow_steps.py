"""Causes that are injected into a loop at random steps are named, and a quiet loop names none that
another log does not know.
"""

import gc
import io
import random
import time
from types import SimpleNamespace

import pynvml
import pytest
import torch
from torch import nn

from cs336 import watch
from cs336.analysis.loop_causes import explained, slow_sentence
from cs336.config import Phase
from cs336.loop_record import Cause, Pause
from cs336.measure.clock import StepTimes
from cs336.measure.nvml import THROTTLE_COUNTERS, GpuMonitor
from cs336.watched.marks import WatchedStep
from cs336.watched.pauses import Pauses
from cs336.watched.slow_steps import SlowSteps
from cs336.watched.tokens import NO_TOKENS
from tests.fake_nvml import fake_driver, unsupported

STEPS, INJECTED = 120, 10
STEP_S, PAUSE_S = 0.02, 0.3


class Clock:
    def __init__(self):
        self.now_ns = 0

    def sleep(self, seconds):
        self.now_ns += round(seconds * 1e9)


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    for module in ("marks", "pauses", "hooks"):
        monkeypatch.setattr(f"cs336.watched.{module}.perf_counter_ns", lambda: made.now_ns)
    return made


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 4)
        self.pause = lambda: None

    def forward(self, inputs):
        self.pause()
        return self.head(inputs)


class SlowFile(io.BytesIO):
    """A file to which the first piece takes long."""

    def __init__(self, clock):
        super().__init__()
        self.clock, self.is_new = clock, True

    def write(self, data):
        if self.is_new:
            self.clock.sleep(PAUSE_S)
        self.is_new = False
        return super().write(data)


def collect(clock, model, watched):
    def take_time(phase, _):
        if phase == "stop":
            clock.sleep(PAUSE_S)

    gc.callbacks.insert(0, take_time)
    gc.collect()
    gc.callbacks.remove(take_time)


def save(clock, model, watched):
    torch.save(model.head.state_dict(), SlowFile(clock))


def evaluate(clock, model, watched):
    model.pause = lambda: clock.sleep(PAUSE_S / 3)
    with torch.no_grad():
        for _ in range(3):
            model(torch.zeros(2, 4))
    model.pause = lambda: None


def wait_for_data(clock, model, watched):
    def batches():
        clock.sleep(PAUSE_S)
        yield 0

    list(watched.data(batches()))


INJECTIONS = {
    Cause.COLLECTION: collect,
    Cause.SAVING: save,
    Cause.EVALUATION: evaluate,
    Cause.DATA: wait_for_data,
}


@pytest.fixture
def no_collections():
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("in_step", [True, False])
@pytest.mark.parametrize("cause", INJECTIONS)
def test_an_injected_cause_is_named_with_what_it_took(
    cause, in_step, clock, tmp_path, no_collections
):
    generator = random.Random(f"{cause}{in_step}")
    slow = sorted(generator.sample(range(STEPS), INJECTED))
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched = watch(model, optimizer, warmup_steps=1, output=tmp_path)
    for number in range(-1, STEPS):
        is_slow = number in slow
        if is_slow and not in_step:
            INJECTIONS[cause](clock, model, watched)
        with watched.step():
            if is_slow and in_step:
                INJECTIONS[cause](clock, model, watched)
            model(torch.zeros(2, 4)).sum().backward()
            optimizer.step()
            clock.sleep(generator.gauss(STEP_S, STEP_S / 100))
    record = watched.record()
    watched.remove()
    seen = {step.number: step.pauses for step in record.seen.slow_steps}
    assert sorted(seen) == slow
    for pauses in seen.values():
        (pause,) = pauses
        assert pause.cause is cause
        assert pause.seconds == pytest.approx(PAUSE_S, abs=STEP_S / 10)
    assert "not explained" not in slow_sentence(record)


def test_a_compilation_is_named_with_the_size_that_changed(clock, tmp_path, no_collections):
    def backend(graph, _):
        clock.sleep(PAUSE_S)
        return graph.forward

    torch._dynamo.reset()
    slow = sorted(random.Random(0).sample(range(STEPS), INJECTED))
    model = torch.compile(nn.Linear(4, 4), backend=backend, dynamic=False)
    watched = watch(model, warmup_steps=1, output=tmp_path)
    with torch._dynamo.config.patch(recompile_limit=4 * INJECTED):
        for number in range(-1, STEPS):
            size = 11 + slow.index(number) if number in slow else 8
            with watched.step():
                model(torch.zeros(size, 4)).sum().backward()
                clock.sleep(STEP_S)
    seen = watched.record().seen.slow_steps
    watched.remove()
    torch._dynamo.reset()
    assert [step.number for step in seen] == slow
    for size, step in enumerate(seen, start=11):
        (pause,) = step.pauses
        assert pause.cause is Cause.COMPILATION
        assert str(size) in pause.details[0]


def made_step(step_s):
    times = StepTimes(
        step_s=step_s, host_s=step_s, phases_s={Phase.FORWARD: step_s}, host_phases_s={}
    )
    return WatchedStep(times=times, between_s=0.0, between_data_s=0.0, tokens=NO_TOKENS)


def test_what_the_allocator_counts_is_seen_without_a_time(monkeypatch):
    counters = {"segment": {"all": {"allocated": 5}}, "num_alloc_retries": 0}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda: counters)
    now_s = [0.0]
    monkeypatch.setattr("cs336.watched.slow_steps.monotonic", lambda: now_s[0])
    monkeypatch.setattr("cs336.watched.slow_steps.perf_counter_ns", lambda: int(1e9 * now_s[0]))
    part = SlowSteps(Pauses(), dict)
    slow = random.Random(1).sample(range(20, STEPS), INJECTED)
    steps = []
    for number in range(-1, STEPS):
        is_slow = number in slow
        now_s[0] += 30.0 if is_slow else 11.0
        if is_slow:
            counters["num_alloc_retries"] += 2
        part.step_ended(number)
        step = made_step(PAUSE_S if is_slow else STEP_S)
        part.steps_read(number, [step])
        if number >= 0:
            steps.append(step)
    seen = part.slow_steps([], steps)
    assert [step.number for step in seen] == sorted(slow)
    for step in seen:
        (pause,) = step.pauses
        assert (pause.cause, pause.seconds) == (Cause.ALLOCATOR, None)


@pytest.mark.parametrize("seed", range(10))
def test_throttling_is_seen_by_its_counters(seed, monkeypatch):
    """The made GPU is at its power limit most of the time, and throttled by heat in some steps: the
    counters are those of the driver's fake library.
    """
    chance = random.Random(seed)
    answers = fake_driver(monkeypatch)
    lowered_ns = dict.fromkeys(THROTTLE_COUNTERS, 0)

    def values(_, fields):
        return [
            SimpleNamespace(
                fieldId=field,
                nvmlReturn=pynvml.NVML_SUCCESS,
                value=SimpleNamespace(ullVal=lowered_ns[field]),
            )
            for field in fields
        ]

    answers.nvmlDeviceGetFieldValues = values
    now_s = [0.0]
    monkeypatch.setattr("cs336.watched.slow_steps.monotonic", lambda: now_s[0])
    part = SlowSteps(Pauses(), GpuMonitor("GPU-0").throttled_s)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", dict)
    slow = sorted(chance.sample(range(20, STEPS), INJECTED))
    hot = set(slow[::2])
    power, heat = (pynvml.NVML_FI_DEV_PERF_POLICY_POWER, pynvml.NVML_FI_DEV_PERF_POLICY_THERMAL)
    share = chance.uniform(0.5, 1.0)
    steps = []
    for number in range(-1, STEPS):
        part.step_begins(number)
        step_s = 3.0 if number in slow else 1.0
        now_s[0] += step_s
        lowered_ns[power] += round(1e9 * share * step_s)
        if number in hot:
            lowered_ns[heat] += 2_000_000_000
        part.step_ended(number)
        step = made_step(step_s)
        part.steps_read(number, [step])
        if number >= 0:
            steps.append(step)
    seen = {step.number: step.pauses for step in part.slow_steps([], steps)}
    assert sorted(seen) == slow
    for number, pauses in seen.items():
        details = [detail for pause in pauses for detail in pause.details]
        assert not any("power" in detail for detail in details)
        assert any("thermal for up to" in detail for detail in details) is (number in hot)
    for pauses in seen.values():
        assert all((pause.cause, pause.seconds) == (Cause.CLOCK, None) for pause in pauses)


def test_a_card_without_counters_of_throttled_time_tells_nothing(monkeypatch):
    answers = fake_driver(monkeypatch)
    answers.nvmlDeviceGetFieldValues = unsupported
    assert GpuMonitor("GPU-0").throttled_s() == {}
    answers.nvmlDeviceGetFieldValues = lambda _, fields: [
        SimpleNamespace(fieldId=field, nvmlReturn=pynvml.NVML_ERROR_NOT_SUPPORTED)
        for field in fields
    ]
    assert GpuMonitor("GPU-0").throttled_s() == {}


def test_causes_of_2000_quiet_steps_are_those_of_another_log(tmp_path):
    """The log has the length of each garbage collection by step."""
    logged, begun = {}, [0]

    def log(phase, _):
        if phase == "start":
            begun[0] = time.perf_counter_ns()
        else:
            took = time.perf_counter_ns() - begun[0]
            logged[number] = logged.get(number, 0) + took

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched = watch(model, optimizer, warmup_steps=5, output=tmp_path)
    gc.callbacks.insert(0, log)
    number = -5
    while number < 2000:
        with watched.step():
            model(torch.zeros(2, 4)).sum().backward()
            optimizer.step()
        number += 1
    gc.callbacks.remove(log)
    seen = watched.record().seen.slow_steps
    watched.remove()
    for step in seen:
        for pause in step.pauses:
            assert pause.cause is Cause.COLLECTION
            # the log is one step late where a collection runs after the step's end
            took = logged.get(step.number, 0) + logged.get(step.number - 1, 0)
            assert took + logged.get(step.number + 1, 0) > 0


def test_causes_explain_no_more_than_the_excess():
    within = Pause(cause=Cause.COLLECTION, seconds=0.2)
    around = Pause(cause=Cause.EVALUATION, seconds=1.0)
    pauses = explained([around, within, Pause(cause=Cause.DATA, seconds=0.01)], 1.0)
    assert [(pause.cause, pause.seconds) for pause in pauses] == [
        (Cause.COLLECTION, 0.2),
        (Cause.EVALUATION, 0.8),
    ]


def test_nothing_is_left_of_the_callbacks(tmp_path):
    before = list(gc.callbacks)
    watched = watch(Model(), output=tmp_path)
    with watched.step():
        assert len(gc.callbacks) == len(before) + 1
    watched.remove()
    assert gc.callbacks == before
    assert not hasattr(torch.save, "__wrapped__")
