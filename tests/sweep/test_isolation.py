"""What the fork server is told to import for its workers."""

import importlib.util
import multiprocessing.forkserver
from collections.abc import Iterator
from dataclasses import replace

import pytest

from cs336_systems.config import SIZES, CompileMode, Device, Mode, OptimizerKind, Profiler, RunConfig
from cs336_systems.sweep.isolation import fork_server, preload
from cs336_systems.sweep.run import compiler_modules


@pytest.fixture
def preloaded() -> Iterator[list[str]]:
    """The modules, which a fork server that the tests started already has imported or not."""
    fork_server()
    server = multiprocessing.forkserver._forkserver  # type: ignore[attr-defined]
    before = list(server._preload_modules)
    yield before
    fork_server().set_forkserver_preload(before)


@pytest.mark.parametrize(
    ("changes", "modules"),
    [
        ({}, []),
        ({"checkpoint_blocks": 1}, ["torch._dynamo"]),
        ({"optimizer": OptimizerKind.FUSED}, ["torch._dynamo"]),
        ({"optimizer": OptimizerKind.FUSED, "mode": Mode.INFERENCE}, []),
        ({"profiler": Profiler.KINETO}, ["torch._dynamo"]),
        ({"compile": CompileMode.DEFAULT}, ["torch._dynamo", "torch._inductor.compile_fx"]),
        ({"compile": CompileMode.DEFAULT, "device": Device.CUDA}, ["torch._dynamo"]),
    ],
)
def test_the_compiler_is_imported_after_all_else_for_runs_that_need_it(
    preloaded: list[str], changes: dict[str, object], modules: list[str]
) -> None:
    plain = RunConfig(size="tiny", model=SIZES["tiny"])
    preload(*compiler_modules([plain, replace(plain, **changes)]))
    found = multiprocessing.forkserver._forkserver._preload_modules  # type: ignore[attr-defined]
    assert found == [*preloaded[:2], *modules]
    assert found[0] == "cs336_systems.sweep.preload"
    assert all(importlib.util.find_spec(name) for name in found), "the server says nothing of what it does not find"
