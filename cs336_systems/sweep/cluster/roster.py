"""Which machines of a cluster have an agent of the sweep, and which of the others get one."""

import itertools
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from cs336_systems.sweep.cluster.measurer import Description

MAX_AGENTS = 3
"""How many agents in a row may fail on a living machine, without a record in between, before it is left alone."""


@dataclass(slots=True)
class Member:
    """An agent on a machine."""

    host: str
    actor: Any
    """The engine's handle of it."""
    heard: bool = False
    """Whether the agent has answered yet. Until then it may be waiting for GPUs that another job holds."""
    description: Description | None = None
    """The agent's description of its machine, which the driver knows from then on."""


class Roster:
    """The agents by their names: the id of the machine, and a number, because another may follow there."""

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self.away: dict[str, Description | None] = {}
        """Ids of machines that may join again, with what each was like if the driver refused it for that."""
        self._numbers = itertools.count()
        self._settled: set[str] = set()
        """Ids of machines that need no further agent."""
        self._failed: Counter[str] = Counter()
        """How many agents have failed on each machine since the last record from it."""

    @property
    def is_empty(self) -> bool:
        """Whether no machine has been given an agent yet."""
        return not self._settled

    def newcomers(self, alive: Collection[str]) -> Iterator[str]:
        """Names for the agents of those machines that need one; from now on they need none."""
        for machine in alive:
            if machine not in self._settled:
                self._settled.add(machine)
                yield f"{machine}/{next(self._numbers)}"

    def gone(self, alive: Collection[str]) -> list[str]:
        """Names of agents whose machines are not there any more."""
        return [name for name in self.members if machine_of(name) not in alive]

    def has_measured(self, name: str) -> None:
        """Note that a record has come from the machine, so that earlier failures no longer count."""
        self._failed.pop(machine_of(name), None)

    def has_failed(self, name: str) -> bool:
        """Note that the agent has failed; return whether the machine may have another one."""
        self._failed[machine_of(name)] += 1
        return self._failed[machine_of(name)] < MAX_AGENTS

    def expect_back(self, name: str, refused: Description | None = None) -> None:
        """Let the machine join again: a refused one once it has changed, another unless it has failed too often."""
        if refused is not None or self.has_failed(name):
            self.away[machine_of(name)] = refused

    def forget_others(self, alive: Collection[str]) -> None:
        """Forget machines that are away and no longer alive: a machine that restarts has another id."""
        self.away = {machine: refused for machine, refused in self.away.items() if machine in alive}

    def is_usable(self, machine: str, found: Description) -> bool:
        """Whether a machine that is away has changed since it was refused; True if it was not refused."""
        refused = self.away.get(machine)
        return refused is None or found.kind != refused.kind

    def welcome(self, machine: str) -> None:
        """The machine needs an agent again."""
        self.away.pop(machine, None)
        self._settled.discard(machine)


def machine_of(name: str) -> str:
    """The id of the machine on which the agent of this name is."""
    return name.partition("/")[0]
