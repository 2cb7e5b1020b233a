"""A loop of one's own, watched: times on a clock that only sleeping moves, and numbers that stay
the same.
"""

import contextlib
import copy
import csv
from dataclasses import replace

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from cs336 import watch
from cs336.analysis.kernels.phases import LaunchPhase
from cs336.analysis.kernels.step_profile import decode_profile
from cs336.analysis.memory.notes import SightingKind, notes_path, read_notes
from cs336.cli import main
from cs336.config import SIZES, Mode, Phase, Profiler, RunConfig
from cs336.model.annotate import annotate
from cs336.record import WarningCode, load_records, read_record, write_record
from cs336.watched.observer import Observers
from cs336.watched.profiled import PROFILED_STEPS, Profiled
from tests.analysis.kernels.tracing import num_matmuls
from tests.measure.allocator import make_up_allocator

MS = 1e-3
FORWARD, LOSS, BACKWARD, OPTIMIZER, LOAD = 20 * MS, 5 * MS, 40 * MS, 8 * MS, 3 * MS


class Clock:
    def __init__(self):
        self.now_ns = 0

    def sleep(self, seconds):
        self.now_ns += round(seconds * 1e9)


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr("cs336.watched.marks.perf_counter_ns", lambda: made.now_ns)
    return made


class Slow(torch.autograd.Function):
    """The identity, whose backward takes a while."""

    @staticmethod
    def forward(ctx, values, clock):
        ctx.clock = clock
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.clock.sleep(BACKWARD)
        return gradient, None


class Model(nn.Module):
    def __init__(self, clock, is_checkpointed=None):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.positions = nn.Embedding(8, 8)
        self.clock, self.is_checkpointed = clock, is_checkpointed

    def forward(self, tokens):
        self.clock.sleep(FORWARD)
        hidden = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[-1]))
        hidden = Slow.apply(hidden, self.clock)
        if self.is_checkpointed is None:
            return self.head(hidden)
        return checkpoint(self.head, hidden, use_reentrant=self.is_checkpointed)


class Timed(torch.optim.SGD):
    def __init__(self, parameters, clock):
        super().__init__(parameters, lr=0.1)
        self.clock = clock

    def step(self, closure=None):
        self.clock.sleep(OPTIMIZER)
        return super().step(closure)


def loop(model, clock, watched=None, steps=4, micro_batches=1, optimizers=None):
    """A training loop; returns the losses."""
    optimizers = optimizers or [Timed(model.parameters(), clock)]
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        clock.sleep(100 * MS)  # between the steps
        with watched.step() if watched else contextlib.nullcontext():
            for _ in range(micro_batches):
                tokens = torch.randint(11, (4, 8), generator=generator)
                clock.sleep(LOAD)
                loss = cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
                clock.sleep(LOSS)
                loss.backward()
                losses.append(loss.item())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return losses


def phases(record):
    return {each.phase: each.times_s for each in record.measurements}


@pytest.mark.parametrize(
    "is_checkpointed", [None, False, True], ids=["plain", "checkpoint", "reentrant checkpoint"]
)
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_phases_are_what_was_slept_in_them(clock, tmp_path, micro_batches, is_checkpointed):
    model = Model(clock, is_checkpointed)
    optimizer = Timed(model.parameters(), clock)
    watched = watch(model, optimizer, warmup_steps=1, output=tmp_path)
    loop(model, clock, watched, micro_batches=micro_batches, optimizers=[optimizer])
    record = watched.record()
    expected = {
        Phase.FORWARD: micro_batches * FORWARD,
        Phase.BACKWARD: micro_batches * BACKWARD,
        Phase.OPTIMIZER: OPTIMIZER,
        Phase.OTHER: micro_batches * (LOAD + LOSS),
    }
    expected[Phase.STEP] = sum(expected.values())
    assert phases(record) == {phase: pytest.approx([time] * 3) for phase, time in expected.items()}
    assert record.between_s == pytest.approx([100 * MS] * 3)
    assert record.loop.mode is Mode.TRAIN
    assert (record.loop.batch_size, record.loop.context_length) == (4 * micro_batches, 8)
    assert record.num_parameters == 11 * 8 + 8 * 8 + 8 * 11 + 11


def test_hooks_of_others_are_part_of_the_call(clock, tmp_path):
    """As those of fully_shard, which gather the parameters before the model runs."""
    model = Model(clock)
    model.register_forward_pre_hook(lambda *_: clock.sleep(7 * MS))
    model.register_forward_hook(lambda *_: clock.sleep(3 * MS))
    watched = watch(model, warmup_steps=0, output=tmp_path)
    loop(model, clock, watched)
    forward_s = watched.record().measurement(Phase.FORWARD).times_s
    assert forward_s == pytest.approx([FORWARD + 10 * MS] * 4)


def test_of_a_loop_nothing_is_said_that_was_not_seen(clock, tmp_path, capsys, no_pictures):
    """Neither tokens, as of a model of images, nor an optimizer, nor the settings of a run."""
    model = nn.Linear(2, 2)
    watched = watch(model, name="images", warmup_steps=0, output=tmp_path)
    with watched.step():
        model(torch.zeros(5, 2))
        clock.sleep(FORWARD)
    watched.report()
    assert main(["report", str(tmp_path)]) == 0
    assert "tokens/s" not in capsys.readouterr().out
    text = (tmp_path / "e2e_benchmark/images/results.csv").read_text()
    (row,) = csv.DictReader(text.splitlines())
    timed = {name for name in row if name.startswith(("forward_", "step_", "other_"))}
    seen = {"size", "mode", "precision", "device_name", "device", "status", "processes"}
    assert {name for name, cell in row.items() if cell} - timed == seen | {
        "warmup_steps",
        "measured_steps",
        "model_tflops_per_s",  # of the shape that the model was called with
    }


def test_loops_that_earlier_versions_recorded_as_runs_are_loops(clock, tmp_path):
    model = Model(clock)
    optimizer = Timed(model.parameters(), clock)
    watched = watch(model, optimizer, warmup_steps=1, output=tmp_path)
    loop(model, clock, watched, optimizers=[optimizer])
    loop_now = watched.record()
    shape = replace(SIZES["tiny"], context_length=8)
    config = RunConfig(
        size="own", model=shape, model_factory="watch:mine", warmup_steps=1, measured_steps=3
    )
    earlier = msgspec.to_builtins(loop_now) | {"config": msgspec.to_builtins(config)}
    del earlier["loop"]
    path = tmp_path / f"{config.key}.json"
    path.write_bytes(msgspec.json.encode(earlier))
    record = read_record(path)
    assert record.subject == loop_now.subject
    assert write_record(record, tmp_path) == path, "its profile has this name too"


def test_numbers_stay_the_same_and_nothing_is_left_behind(clock):
    plain = Model(clock)
    watched_model, backward = copy.deepcopy(plain), torch.autograd.backward
    watched = watch(watched_model, warmup_steps=0)
    assert loop(plain, clock) == loop(watched_model, clock, watched)
    for ours, theirs in zip(watched_model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.autograd.backward is backward
    watched.remove()
    assert not watched_model._forward_pre_hooks


def test_a_step_that_raises_is_not_counted_and_a_validation_neither(clock):
    model, backward = Model(clock), torch.autograd.backward
    watched = watch(model, warmup_steps=0)
    with pytest.raises(ZeroDivisionError), watched.step():
        raise ZeroDivisionError
    assert torch.autograd.backward is backward
    with pytest.raises(RuntimeError, match="no step"):
        watched.record()
    with torch.no_grad():
        model(torch.zeros(1, 8, dtype=torch.int64))
    loop(model, clock, watched, steps=2)
    assert phases(watched.record())[Phase.FORWARD] == pytest.approx([FORWARD] * 2)


def test_a_loop_without_steps_is_told_where_its_code_belongs(clock):
    model = Model(clock)
    watched = watch(model, warmup_steps=1)
    model(torch.zeros(1, 8, dtype=torch.int64)).sum().backward()
    with pytest.raises(RuntimeError, match=r"with watched.step\(\)"):
        watched.record()
    loop(model, clock, watched, steps=1)
    with pytest.raises(RuntimeError, match="warmup_steps=0"):
        watched.record()


def test_steps_do_not_nest_and_wrong_arguments_are_refused(clock):
    watched = watch(Model(clock))
    with watched.step(), pytest.raises(RuntimeError, match="nest"), watched.step():
        pass
    with pytest.raises(ValueError, match="my model"):
        watch(Model(clock), name="my model")
    with pytest.raises(ValueError, match="-1"):
        watch(Model(clock), warmup_steps=-1)


def test_a_recorded_loop_says_which_tensor_is_at_which_address(clock, tmp_path, monkeypatch):
    """With the counters of a GPU's allocator made up."""
    make_up_allocator(monkeypatch)
    model = Model(clock)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    watched = watch(model, optimizer, warmup_steps=1, output=tmp_path)
    loop_in_memory = replace(watched._loop, profiler=Profiler.MEMORY)
    recorded = Profiled(model, (optimizer,), loop_in_memory, tmp_path)
    watched._parts.profiled = recorded
    watched._parts.steps.observers = observers = Observers([recorded])
    watched._parts.timeline.told = observers.phase_begins
    loop(model, clock, watched, optimizers=[optimizer], steps=PROFILED_STEPS + 3)
    recorded.move(tmp_path / "raw.pickle")
    notes = read_notes(notes_path(tmp_path / "raw.pickle"))
    names = {
        kind: {each.name for each in notes.sightings if each.kind is kind} for kind in SightingKind
    }
    parameters = {name for name, _ in model.named_parameters()}
    assert names[SightingKind.PARAMETER] == names[SightingKind.GRADIENT] == parameters
    assert names[SightingKind.OPTIMIZER_STATE] == {
        f"momentum_buffer of {name}" for name in parameters
    }
    assert any("head" in name for name in names[SightingKind.SAVED])
    assert [mark.name for mark in notes.marks[-4:]] == ["start", "forward", "backward", "optimizer"]
    with pytest.raises(ValueError, match="needs the model on a GPU"):
        watch(model, memory=True)
    with pytest.raises(ValueError, match="give one of them"):
        watch(model, memory=True, profile=True)


def test_several_optimizers_and_none(clock):
    model = Model(clock)
    optimizers = [Timed(part.parameters(), clock) for part in (model.embedding, model.head)]
    watched = watch(model, optimizers, warmup_steps=0)
    loop(model, clock, watched, optimizers=optimizers)
    record = watched.record()
    assert phases(record)[Phase.OPTIMIZER] == pytest.approx([2 * OPTIMIZER] * 4)
    assert WarningCode.FEW_WARMUP_STEPS in {warning.code for warning in record.warnings}

    without = watch(model, warmup_steps=0)
    with without.step():
        model(torch.zeros(1, 8, dtype=torch.int64))
    assert without.record().loop.mode is Mode.FORWARD


def test_wrappers_around_the_model(clock, tmp_path):
    compiled = torch.compile(Model(clock), backend="eager")
    watched = watch(compiled, warmup_steps=1)
    loop(compiled, clock, watched)
    assert phases(watched.record())[Phase.BACKWARD] == pytest.approx([BACKWARD] * 3)

    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        shared = nn.parallel.DistributedDataParallel(Model(clock))
        watched = watch(shared, warmup_steps=1)
        loop(shared, clock, watched)
        assert phases(watched.record())[Phase.BACKWARD] == pytest.approx([BACKWARD] * 3)
    finally:
        dist.destroy_process_group()


def test_a_record_is_kept_of_each_process_and_the_report_has_its_row(
    clock, tmp_path, capsys, no_pictures
):
    for _ in range(2):
        model = Model(clock)
        watched = watch(model, name="mine", warmup_steps=1, output=tmp_path)
        loop(model, clock, watched, steps=2)
        watched.report()  # of fewer steps, in whose place the next comes
        loop(model, clock, watched, steps=2)
        path = watched.report()
    records, problems = load_records(tmp_path / "e2e_benchmark/mine/runs")
    assert (sorted(each.loop.repeat for each in records), problems) == ([0, 1], [])
    assert read_record(path).measurement(Phase.STEP).times_s == pytest.approx([76 * MS] * 3)
    row = next(
        line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("mine ")
    )
    assert row[:4] == ["mine", "8", "fp32", "76.00"]
    assert main(["report", str(tmp_path)]) == 0
    assert ",76," in (tmp_path / "e2e_benchmark/mine/results.csv").read_text()


def test_two_processes_that_report_at_once_have_a_record_each(
    clock, tmp_path, monkeypatch, no_pictures
):
    both = []
    for _ in range(2):
        both.append(watch(model := Model(clock), warmup_steps=1, output=tmp_path))
        loop(model, clock, both[-1], steps=2)

    def write_after_the_other(record, runs):
        if both:
            both.pop().report()
        return write_record(record, runs)

    monkeypatch.setattr("cs336.watched.loop.write_record", write_after_the_other)
    both.pop().report()
    assert len(load_records(tmp_path / "e2e_benchmark/mine/runs")[0]) == 2


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_profiled_loop_is_explained_with_modules_and_phases(tmp_path, micro_batches, capsys):
    clock = Clock()
    model = Model(clock)
    watched = watch(model, warmup_steps=1, profile=True, output=tmp_path)
    loop(model, clock, watched, steps=7, micro_batches=micro_batches)
    path = watched.report()
    assert watched.report() == path, "the steps after the profiled ones are not recorded"
    assert [*path.parent.iterdir()] == [path]
    assert len(read_record(path).measurement(Phase.STEP).times_s) == PROFILED_STEPS
    profile = decode_profile((path.parents[1] / "kernels" / path.name).read_bytes())
    assert profile.num_steps == PROFILED_STEPS
    products = {
        (part.path[:2], part.phase): part.count
        for part in profile.modules
        if part.path[:2] == ("Model", "head")
    }
    counts = {phase: num_matmuls(profile, phase) for phase in LaunchPhase}
    assert {key[1] for key in products} == {"forward", "backward"}
    steps = PROFILED_STEPS * micro_batches
    assert {phase: count for phase, count in counts.items() if count} == {
        "forward": steps,
        "backward": 2 * steps,
    }
    assert "Model > head" in capsys.readouterr().out
    assert annotate("anything") is annotate("other"), "nothing is annotated afterwards"
