"""The process between driver and Ray: whatever ends it, the driver is told why. Of Ray, only the names are used."""

import asyncio
import os
import sys
import time

import pytest

pytest.importorskip("ray", reason="needs Ray: pip install ray")

from cs336_systems.config import Device
from cs336_systems.sweep.cluster import bridge
from cs336_systems.sweep.cluster.patience import Patience

PATIENCE = Patience(look_s=0.01, head_s=1.0)


class Agents:
    """Agents that are told of machines, and do nothing."""

    def __init__(self, *_):
        self.looks, self.ended = 0, False

    async def renew(self):
        await asyncio.sleep(60)

    look_again = renew

    def update(self, alive):
        self.looks += 1

    def obey(self, command):
        pass

    def end(self):
        self.ended = True


class Speaker:
    """Remembers what was said."""

    def __init__(self):
        self.said, self.ended = [], False

    def say(self, message):
        self.said.append(message)

    def end(self):
        self.ended = True


@pytest.fixture
def driver(monkeypatch):
    """The driver's end of the pipe from which commands are read."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as standard_input, os.fdopen(writing, "wb") as commands:
        monkeypatch.setattr(sys, "stdin", standard_input)
        yield commands


def served(monkeypatch, agents=Agents, machines=lambda: {"this": {}}):
    """Serve until it ends, on a machine called "this"; what was said."""
    made, speaker = [], Speaker()
    monkeypatch.setattr(bridge, "Agents", lambda *words: made.append(agents(*words)) or made[-1])
    monkeypatch.setattr(bridge, "this_machine", lambda: "this")
    # the process would end where the speaker does; here the watch must end, since Python 3.11 can lose its cancellation
    monkeypatch.setattr(bridge, "machines", lambda: {} if speaker.ended else machines())
    monkeypatch.setattr(bridge, "num_pending", lambda: 0)
    monkeypatch.setattr(bridge, "_PARTING_S", 0.01)
    asyncio.run(bridge._serve(Device.CPU, (), PATIENCE, speaker))
    assert (speaker.ended, made[0].ended) == (True, True)
    return [message.failed for message in speaker.said], made[0]


def test_it_ends_without_a_word_with_its_driver(monkeypatch, driver):
    class Ending(Agents):
        def update(self, alive):
            super().update(alive)
            if self.looks == 3:
                driver.close()

    said, agents = served(monkeypatch, Ending)
    assert said == []
    assert agents.looks >= 3


def test_it_says_that_ray_has_died_on_its_machine_or_that_the_head_is_silent(monkeypatch, driver):
    (said,), agents = served(monkeypatch, machines=lambda: {"another": {}})
    assert "Ray has died on this machine" in said
    assert agents.looks == 0
    (said,), _ = served(monkeypatch, machines=lambda: time.sleep(1.5))
    assert "did not answer within 1 s" in said


@pytest.mark.parametrize("name", ["renew", "look_again"])
def test_a_task_that_fails_ends_it_with_the_reason(monkeypatch, driver, name):
    async def fail(_):
        raise KeyError("what nobody expected")

    failing = type("Failing", (Agents,), {name: fail})
    (said,), _ = served(monkeypatch, failing)
    assert "what nobody expected" in said


def test_a_command_that_is_none_ends_it_with_the_reason(monkeypatch, driver):
    driver.write(b'{"name": 3}\n')
    driver.flush()
    (said,), _ = served(monkeypatch)
    assert "name" in said
