"""Every test of a fault has a directory of its own to be in, and must leave no process there."""

import os
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from cs336_systems.sweep.isolation import ensure_fork_server
from tests.faults.harness import Command, eventually, lay_out_models, processes_in


@pytest.fixture(scope="session")
def preloaded():
    """The fork server starts in a directory that belongs to no test, and its workers need not import pytest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(sys.modules["__main__"], "__file__", raising=False)
        ensure_fork_server()
        yield


@pytest.fixture
def place(tmp_path, monkeypatch, preloaded):
    """The current directory, of this process and of all that the test starts."""
    monkeypatch.chdir(tmp_path)
    lay_out_models(tmp_path)
    yield tmp_path
    assert eventually(lambda: not processes_in(tmp_path)), processes_in(tmp_path)


@pytest.fixture
def launch(place):
    """Start a command in `place`; whatever comes of it is ended with the test."""
    commands = []

    def start(words, **options):
        commands.append(Command(place, words, **options))
        return commands[-1]

    yield start
    ended = eventually(lambda: not processes_in(place))
    left = processes_in(place)
    for each in commands:
        each.close()
    assert ended, left


@pytest.fixture
def chance(request):
    return random.Random(f"{os.environ.get('CS336_FAULT_SEED', '6')} {request.node.name}")
