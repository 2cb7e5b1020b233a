"""What a watched model, and a watched loop, leave behind, however they end."""

import contextlib
import copy
import functools
import gc
import io
import os
import pickle
import subprocess
import sys
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from cs336 import watch
from cs336.config import Phase
from cs336.record import WarningCode, load_records
from cs336.watched.loop import UNREPORTED

VOCABULARY, WIDTH = 11, 8


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


def make():
    torch.manual_seed(0)
    model = Model()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(watched, model, optimizer, steps=4):
    for number in range(steps):
        with watched.step():
            tokens = (torch.arange(32) + number).reshape(4, 8) % VOCABULARY
            cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()


def phases(record):
    return {each.phase for each in record.measurements}


def hooks_of(model):
    return [module for module in model.modules() if module._forward_pre_hooks]


def test_a_copy_of_a_watched_model_is_whole_and_not_watched(tmp_path):
    model, optimizer = make()
    watched = watch(model, optimizer, warmup_steps=0, output=tmp_path)
    train(watched, model, optimizer)
    torch.save(model, saved := io.BytesIO())
    # loads where this program is not installed
    assert b"cs336" not in saved.getvalue() + pickle.dumps(model) + pickle.dumps(optimizer)
    copies = [
        copy.deepcopy(model),
        copy.copy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(io.BytesIO(saved.getvalue()), weights_only=False),
        torch.optim.swa_utils.AveragedModel(model),
    ]
    num_steps = len(watched.record().measurement(Phase.STEP).times_s)
    tokens = torch.zeros(4, 8, dtype=torch.int64)
    for copied in copies:
        with watched.step():
            copied(tokens).sum().backward()
        assert torch.equal(copied(tokens), model(tokens))
    later = watched.record()
    assert later.seen.tokens[num_steps:] == (0,) * len(copies)
    assert later.measurement(Phase.FORWARD).times_s[num_steps:] == (0,) * len(copies)
    copied = copy.deepcopy(optimizer)
    assert copied.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()


def test_a_saved_model_has_only_the_hooks_of_the_user(tmp_path):
    model, optimizer = make()
    calls = []
    model.register_forward_hook(lambda *_: calls.append("theirs"))
    watched = watch(model, optimizer, warmup_steps=0, output=tmp_path)
    train(watched, model, optimizer, steps=1)
    copied = copy.deepcopy(model)
    assert calls == ["theirs"]
    copied(torch.zeros(4, 8, dtype=torch.int64))
    assert calls == ["theirs"] * 2
    assert len(copied._forward_hooks) == 1
    assert not copied._forward_pre_hooks_with_kwargs
    assert not copied._forward_hooks_always_called
    watched.remove()
    assert copied.__dict__.keys() == model.__dict__.keys() == Model().__dict__.keys()


def test_a_watched_model_loads_where_only_its_classes_are_allowed(tmp_path):
    model, optimizer = make()
    train(watch(model, optimizer, warmup_steps=0, output=tmp_path), model, optimizer, steps=1)
    torch.save(model, saved := io.BytesIO())
    saved.seek(0)
    with torch.serialization.safe_globals([Model, nn.Embedding, nn.Linear]):
        loaded = torch.load(saved, weights_only=True)
    tokens = torch.zeros(4, 8, dtype=torch.int64)
    assert torch.equal(loaded(tokens), model(tokens))


def test_watching_keeps_no_model_alive(tmp_path):
    model, optimizer = make()
    watched = watch(model, optimizer, output=tmp_path)
    train(watched, model, optimizer)
    references = weakref.ref(model), weakref.ref(optimizer)
    del model, optimizer
    gc.collect()
    assert [reference() for reference in references] == [None, None]


@pytest.mark.parametrize("end", ["report", "remove", "with", "forgotten"])
def test_hooks_are_gone_after_the_loop(tmp_path, end, capsys):
    before = torch.autograd._engine_run_backward, _BaseDataLoaderIter.__next__, DataLoader.__iter__
    model, optimizer = make()
    watched = watch(model, optimizer, warmup_steps=0, output=tmp_path)
    assert hooks_of(model)
    if end == "with":
        with watched:
            train(watched, model, optimizer)
    elif end != "forgotten":
        train(watched, model, optimizer)
        getattr(watched, end)()
    del watched
    gc.collect()
    assert not hooks_of(model)
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    after = torch.autograd._engine_run_backward, _BaseDataLoaderIter.__next__, DataLoader.__iter__
    assert after == before
    records = load_records(tmp_path / "e2e_benchmark/mine/runs")[0]
    assert len(records) == (end in ("report", "with"))


def test_a_loop_that_goes_on_after_its_report_is_watched_again(tmp_path, capsys):
    model, optimizer = make()
    watched = watch(model, optimizer, warmup_steps=0, output=tmp_path)
    for _ in range(2):
        train(watched, model, optimizer)
        watched.report()
    (record,) = load_records(tmp_path / "e2e_benchmark/mine/runs")[0]
    assert len(record.measurement(Phase.STEP).times_s) == 8
    assert all(record.measurement(Phase.FORWARD).times_s)
    # nothing is known of what was between the report and the next step
    assert len(record.between_s) == 6


def test_a_loop_may_be_forgotten_while_another_begins(tmp_path, monkeypatch):
    """Python collects garbage anywhere: here, within the wrapping of PyTorch's functions."""
    from cs336.watched import patches

    before = torch.autograd._engine_run_backward
    forgotten = [watch(make()[0], output=tmp_path)]

    def wraps_late(function):
        forgotten.clear()
        gc.collect()
        return functools.wraps(function)

    forgotten[0].remove()
    monkeypatch.setattr(patches, "functools", SimpleNamespace(wraps=wraps_late))
    model, optimizer = make()
    watched = watch(model, optimizer, warmup_steps=0, output=tmp_path)
    train(watched, model, optimizer)
    assert all(watched.record().measurement(Phase.BACKWARD).times_s)
    watched.remove()
    assert not forgotten
    assert torch.autograd._engine_run_backward is before


SCRIPT = """
import os, signal, sys, torch
from torch import nn
from cs336 import watch

def main(end):
    model = nn.Linear(2, 2)
    watched = watch(model, warmup_steps=1, output=sys.argv[2])
    with watched if end.startswith("with") else open(os.devnull):
        for number in range(5):
            with watched.step():
                model(torch.ones(2)).sum().backward()
                if number == 3 and end.endswith("error"):
                    raise LookupError("theirs")
                if number == 3 and end.endswith("interrupt"):
                    os.kill(os.getpid(), signal.SIGINT)
                if number == 3 and end == "exit":
                    sys.exit(5)
                if number == 3 and end == "fork" and not os.fork():
                    sys.exit(0)

main(sys.argv[1])
"""
ENDS = {
    "end": ({0}, "", 4),
    "fork": ({0}, "", 4),
    "exit": ({5}, "", 2),
    "with error": ({1}, "LookupError: theirs", 2),
    "interrupt": ({1, -2}, "KeyboardInterrupt", 2),
}
"""By the way a process ends: its status, the last line of its errors, and the steps measured."""


def test_a_loop_that_ends_without_its_report_is_reported(tmp_path):
    running = {}
    for end in ENDS:
        words = [sys.executable, "-c", SCRIPT, end, str(tmp_path / end)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        running[end] = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
    for end, (statuses, last, num_steps) in ENDS.items():
        printed, errors = running[end].communicate(timeout=120)
        assert running[end].returncode in statuses, errors
        assert errors.strip().endswith(last)
        (record,) = load_records(tmp_path / end / "e2e_benchmark/mine/runs")[0]
        assert len(record.measurement(Phase.STEP).times_s) == num_steps
        assert printed.count("record: ") == 1


def test_an_error_of_the_report_hides_no_exception(tmp_path, capsys, monkeypatch):
    model, optimizer = make()
    watched = watch(model, optimizer, warmup_steps=9, output=tmp_path)
    train(watched, model, optimizer)
    with pytest.raises(LookupError, match="theirs"), watched:
        raise LookupError("theirs")
    assert "4 of 9 warm-up steps" in capsys.readouterr().err
    assert watched not in UNREPORTED


def test_a_fault_of_our_own_in_a_hook_is_said_and_stops_nothing(tmp_path, monkeypatch):
    model, optimizer = make()
    # of this loop alone: it counts those that others have left
    monkeypatch.setattr("cs336.watched.observer.TROUBLES", troubles := [])
    monkeypatch.setattr("cs336.watched.parts.TROUBLES", troubles)
    watched = watch(model, optimizer, warmup_steps=0, output=tmp_path)
    monkeypatch.setattr(type(watched._parts.reader), "begins", lambda *_: 1 / 0)
    train(watched, model, optimizer)
    record = watched.record()
    (said,) = [each for each in record.warnings if "ZeroDivisionError" in each.message]
    assert said.code is WarningCode.NOT_SEEN


def test_two_loops_in_two_threads_see_their_own_passes(tmp_path):
    """Each thread's tokens are its own, and backward runs in both at once."""
    records, barrier = {}, threading.Barrier(2)

    def run(name, steps):
        model, optimizer = make()
        watched = watch(model, optimizer, warmup_steps=0, output=tmp_path, name=name)
        barrier.wait()
        train(watched, model, optimizer, steps)
        records[name] = watched.record()
        watched.remove()

    threads = [threading.Thread(target=run, args=pair) for pair in (("a", 20), ("b", 30))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, steps in (("a", 20), ("b", 30)):
        assert records[name].seen.tokens == (32,) * steps
        assert all(records[name].measurement(Phase.BACKWARD).times_s)


TRACED = threading.Barrier(2)
"""Where two threads meet if they trace their models at once."""


class Meeting(nn.Linear):
    """Waits within a trace, which shows its weight on a GPU, for the trace of another thread."""

    def forward(self, x):
        if self.weight.is_cuda:
            with contextlib.suppress(threading.BrokenBarrierError):
                TRACED.wait(timeout=0.5)
            # the one that has begun first ends first
            if threading.current_thread().name == "second":
                time.sleep(0.5)
        return super().forward(x)


def test_two_loops_that_are_traced_in_two_threads_leave_the_compiler_as_it_was(tmp_path):
    import torch._dynamo.eval_frame as compiler

    before = torch.compile, torch.cuda.current_stream, compiler._stance.stance
    traced = []

    def run(name):
        model = Meeting(2, 2)
        watched = watch(model, warmup_steps=0, output=tmp_path, name=name)
        with watched.step():
            model(torch.ones(2)).sum().backward()
        traced.append(watched.record().seen.flops)
        watched.remove()

    threads = [
        threading.Thread(target=run, args=(name,), name=name) for name in ("first", "second")
    ]
    for thread in threads:
        thread.start()
        time.sleep(0.2)
    for thread in threads:
        thread.join()
    assert len(traced) == 2
    assert None not in traced
    assert (torch.compile, torch.cuda.current_stream, compiler._stance.stance) == before


def test_steps_within_a_generator_count_until_it_is_closed(tmp_path):
    model, optimizer = make()
    watched = watch(model, optimizer, warmup_steps=0, output=tmp_path)

    def losses():
        while True:
            with watched.step():
                loss = model(torch.zeros(4, 8, dtype=torch.int64)).sum()
                loss.backward()
                yield loss.item()

    generator = losses()
    for _ in range(4):
        next(generator)
    generator.close()
    assert len(watched.record().measurement(Phase.STEP).times_s) == 3


@pytest.mark.parametrize("kind", ["before", "after", "in place", "within the loop"])
def test_a_compiled_model_is_seen_and_compiled_as_without_watch(tmp_path, kind):
    from torch._dynamo.utils import counters

    graphs = []
    for is_watched in (False, True):
        torch._dynamo.reset()
        counters.clear()
        model, optimizer = make()
        called = torch.compile(model, backend="eager") if kind == "before" else model
        watched = watch(called, optimizer, warmup_steps=1, output=tmp_path)
        if not is_watched:
            watched.remove()
            watched.step = contextlib.nullcontext
        if kind == "after":
            called = torch.compile(model, backend="eager")
        if kind == "in place":
            model.compile(backend="eager")
        train(watched, called, optimizer)
        if kind == "within the loop":
            model.compile(backend="eager", fullgraph=True)
            train(watched, called, optimizer)
        graphs.append((dict(counters["stats"]), dict(counters["graph_break"])))
    record = watched.record()
    watched.remove()
    assert graphs[0] == graphs[1], "no hook is in a graph"
    assert {Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER} <= phases(record)
    assert set(record.seen.tokens) == {32}
    call = model._compiled_call_impl
    assert call is None or "cs336" not in type(call).__module__


def test_of_a_compiled_function_around_the_model_no_phase_is_made_up(tmp_path):
    torch._dynamo.reset()
    model, optimizer = make()
    watched = watch(model, optimizer, warmup_steps=1, output=tmp_path)

    @torch.compile(backend="eager", fullgraph=True)
    def loss_of(tokens):
        return cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    for _ in range(3):
        with watched.step():
            loss_of(torch.zeros(4, 8, dtype=torch.int64)).backward()
            optimizer.step()
            optimizer.zero_grad()
    record = watched.record()
    assert phases(record) == {Phase.STEP}
    assert (record.seen.tokens, record.loop.mode) == ((), None)
    assert [each.code for each in record.warnings].count(WarningCode.NOT_SEEN) == 1
