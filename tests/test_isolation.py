"""What the fork server is told to import for its workers."""

import importlib.util
import multiprocessing.forkserver
from collections.abc import Iterator

import pytest

from cs336_systems.isolation import fork_server, preload_compiler


@pytest.fixture
def preloaded() -> Iterator[list[str]]:
    """The modules, which a fork server that the tests started already has imported or not."""
    fork_server()
    server = multiprocessing.forkserver._forkserver  # type: ignore[attr-defined]
    before = list(server._preload_modules)
    yield before
    fork_server().set_forkserver_preload(before)


def test_the_compiler_is_imported_after_all_else_for_those_who_ask(preloaded: list[str]) -> None:
    preload_compiler()
    found = multiprocessing.forkserver._forkserver._preload_modules  # type: ignore[attr-defined]
    assert found == [*preloaded[:1], "torch._inductor.compile_fx"]
    assert found[0] == "cs336_systems.preload"
    assert all(importlib.util.find_spec(name) for name in found), "the server says nothing of what it does not find"
