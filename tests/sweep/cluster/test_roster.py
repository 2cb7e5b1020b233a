"""Which machines get an agent, and which of those that were left out get another one."""

from dataclasses import replace

import msgspec
import pytest

from cs336_systems.sweep.cluster.measurer import Description
from cs336_systems.sweep.cluster.roster import MAX_AGENTS, Member, Roster, machine_of
from tests.sweep.cluster.simulated import IDENTITY

FOUND = Description(host="h", identity=IDENTITY, gpus=("GPU-a",), has_nsys=False)


def joined(roster, *alive):
    """Give an agent to each machine that needs one; their names."""
    names = [*roster.newcomers(alive)]
    roster.members |= {name: Member("h", object()) for name in names}
    return names


def test_each_machine_gets_one_agent_and_those_that_are_gone_are_known():
    roster = Roster()
    assert roster.is_empty
    names = joined(roster, "a", "b")
    assert not roster.is_empty
    assert [*map(machine_of, names)] == ["a", "b"]
    (third,) = joined(roster, "a", "b", "c")
    assert machine_of(third) == "c"
    assert roster.gone(["b", "c"]) == names[:1]


def test_a_machine_whose_agents_fail_is_left_alone_unless_it_measures_in_between():
    def num_agents(measures_after):
        roster, count = Roster(), 0
        for (name,) in iter(lambda: joined(roster, "a"), []):
            count += 1
            if count == measures_after:
                roster.has_measured(name)
            if roster.has_failed(name):
                roster.welcome("a")
        return count

    assert num_agents(None) == MAX_AGENTS
    assert [num_agents(count) for count in (1, 2, 3)] == [MAX_AGENTS, MAX_AGENTS + 1, MAX_AGENTS + 2]


@pytest.mark.parametrize(
    ("changes", "is_usable"),
    [
        ({}, False),
        ({"gpus": ("GPU-b",)}, False),  # no sweep refuses a machine for these
        ({"identity": replace(IDENTITY, torch="9.9")}, True),
        ({"has_nsys": True}, True),
    ],
)
def test_a_machine_that_was_refused_comes_back_as_another(changes, is_usable):
    roster = Roster()
    (name,) = joined(roster, "a")
    roster.expect_back(name, refused=FOUND)
    assert roster.is_usable("a", msgspec.structs.replace(FOUND, **changes)) is is_usable
    roster.welcome("a")
    assert roster.away == {}
    assert len(joined(roster, "a")) == 1


def test_a_machine_that_failed_comes_back_as_it_is_but_not_for_ever():
    roster, found = Roster(), []
    for _ in range(MAX_AGENTS):
        (name,) = joined(roster, "a")
        roster.expect_back(name)
        found.append("a" in roster.away and roster.is_usable("a", FOUND))
        roster.welcome("a")
    assert found == [True] * (MAX_AGENTS - 1) + [False]


def test_machines_that_are_not_there_any_more_are_not_expected_back():
    roster = Roster()
    for name in joined(roster, "a", "b"):
        roster.expect_back(name, refused=FOUND)
    roster.forget_others(["b", "c"])
    assert [*roster.away] == ["b"]
