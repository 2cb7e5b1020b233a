"""What other processes compile ahead is what a step calls, and only where nothing is kept."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cs336.config import Arch, Device
from cs336.model.fast import compiled_ahead
from cs336.model.fast.compiled_ahead import CACHES, CALLS, compiling_ahead, main
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
    config = replace(FUSED, model=replace(MODEL, arch=arch), batch_size=3, **{setting: True})
    step = drawn_step(config)
    with Signatures() as of_step:
        step.backward(step.forward(step.batches()))
    commands = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", lambda words, **_: commands.append(words))
        for call in CALLS[setting]:
            compiled_ahead._start(call.__name__, config)
    with Signatures() as ahead:
        for words in commands:
            name, device, *rest = words[words.index("-m") + 2 :]
            assert device == "cuda"
            main(name, "cpu", *rest)
    assert ahead.seen == of_step.seen != set()


@pytest.fixture
def started(monkeypatch, tmp_path):
    """The names of what is compiled, by processes that only fail; caches are empty."""
    names = []
    for variable, folder in CACHES.values():
        monkeypatch.setenv(variable, str(tmp_path / folder))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(16), raising=False)

    def fail(name, config):
        names.append(name)
        return subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])

    monkeypatch.setattr(compiled_ahead, "_start", fail)
    return names


def test_only_what_no_package_has_kept_is_compiled(started, tmp_path):
    config = replace(FUSED, packed_attention=True, fused_activations=True)
    with compiling_ahead(config):
        pass
    assert started == []  # on a CPU
    config = replace(config, device=Device.CUDA)
    with compiling_ahead(config):
        pass
    assert started == ["attention", "expand", "contract_backward"]
    kept = tmp_path / CACHES["fused_activations"][1] / "deep" / "kernel.o"
    kept.parent.mkdir(parents=True)
    kept.touch()
    started.clear()
    with compiling_ahead(config):
        pass
    assert started == ["attention"]


def test_no_process_outlives_a_step_that_cannot_be_made(started, monkeypatch):
    processes = []

    def sleep(name, config):
        processes.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))
        return processes[-1]

    monkeypatch.setattr(compiled_ahead, "_start", sleep)
    config = replace(FUSED, packed_attention=True, device=Device.CUDA)
    with pytest.raises(MemoryError), compiling_ahead(config):
        raise MemoryError
    assert [process.returncode for process in processes] != [None]
