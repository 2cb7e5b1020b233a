"""What other processes compile ahead is what a step calls, and only where nothing is kept."""

import contextlib
import os
import time
from dataclasses import replace

import psutil
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cs336 import tried_imports
from cs336.config import Arch, Device
from cs336.model.fast import compiled_ahead
from cs336.model.fast.compiled_ahead import CACHES, CALLS, _words, compile_kernels, compiling_ahead
from tests.model.fast.steps import COPIED, MODEL, drawn_step

FUSED = replace(COPIED, fused_blocks=True, fused_loss=True)
OF_PACKAGES = ("attend", "attend_backward", "expand", "contract_backward")


class Signatures(TorchDispatchMode):
    """Collects what the operators of the packages are called with: types and shapes of tensors,
    and all else.
    """

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        _, _, name = function._schema.name.partition("cs336::")
        if name in OF_PACKAGES:
            given = (
                (each.dtype, *each.shape) if isinstance(each, torch.Tensor) else each
                for each in args
            )
            self.seen.add((name, *given))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("setting", CALLS)
@pytest.mark.parametrize("arch", Arch)
def test_what_is_compiled_ahead_is_what_a_step_calls(arch, setting):
    config = replace(FUSED, model=replace(MODEL, arch=arch), **{setting: True})
    step = drawn_step(config)
    with Signatures() as of_step:
        step.backward(step.forward(step.batches()))
    with Signatures() as ahead:
        for call in CALLS[setting]:
            compile_kernels(*_words(call.__name__, config))
    assert ahead.seen == of_step.seen != set()


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """What a process that has tried imports is told to call; the packages' caches are empty."""
    told = []
    for variable, folder in CACHES.values():
        monkeypatch.setenv(variable, str(tmp_path / folder))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(16), raising=False)
    monkeypatch.setattr(compiled_ahead, "call_elsewhere", lambda calls: told.extend(calls))
    return told


def test_only_what_no_package_has_kept_is_compiled(calls, tmp_path):
    config = replace(FUSED, packed_attention=True, fused_activations=True)
    with compiling_ahead(config):
        pass
    assert calls == []  # on a CPU
    config = replace(config, device=Device.CUDA)
    with compiling_ahead(config):
        pass
    assert [call[2] for call in calls] == ["attention", "expand", "contract_backward"]
    kept = tmp_path / CACHES["fused_activations"][1] / "deep" / "kernel.o"
    kept.parent.mkdir(parents=True)
    kept.touch()
    calls.clear()
    with compiling_ahead(config):
        pass
    assert [call[2] for call in calls] == ["attention"]


STUCK = """
import subprocess, time

def compile_kernels(*_):
    subprocess.run(["sleep", "100"])
"""


@pytest.mark.parametrize("ending", ["a failure", "too long"])
def test_what_is_not_compiled_in_time_is_ended(calls, monkeypatch, tmp_path, ending):
    """With all that it has started, and the step is made without it."""
    (tmp_path / "stuck_kernels.py").write_text(STUCK)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(compiled_ahead, "call_elsewhere", tried_imports.call_elsewhere)
    monkeypatch.setattr(compiled_ahead, "__name__", "stuck_kernels")
    monkeypatch.setattr(compiled_ahead, "MAX_S", 0.5)
    tried_imports.do_meanwhile(lambda: None)
    assert tried_imports._import_elsewhere(["stuck_kernels"]) == {"stuck_kernels": None}
    (process,) = tried_imports._idle
    config = replace(FUSED, packed_attention=True, device=Device.CUDA)
    with contextlib.suppress(MemoryError), compiling_ahead(config):
        if ending == "a failure":
            raise MemoryError
    session = process.pid
    deadline = time.monotonic() + 10
    while running_in(session):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def running_in(session):
    """The processes of this session that have not ended."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            is_there = process.status() != psutil.STATUS_ZOMBIE
            if is_there and os.getsid(process.pid) == session:
                found.append(process)
    return found
