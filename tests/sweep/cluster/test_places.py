"""What runs on which machine, and which machine is overdue: drawn events, and a plain list of them as the oracle."""

import random

import pytest

from cs336_systems.sweep.cluster.places import Places, Run
from tests.sweep.cluster.simulated import grid, node, record_of


def made(config, width=1):
    return Run(0, config, config.key, config.digest, width)


@pytest.mark.parametrize("seed", range(20))
def test_drawn_events(seed):
    draw, places = random.Random(seed), Places()
    for number in range(3):
        places.add(node(number, slots=4))
    free, running, deadlines, met = dict.fromkeys(["node-0", "node-1", "node-2"], 4), {}, {}, {}
    for now_s, config in enumerate(grid(200)):
        place = draw.choice([*places])
        name = place.node.name
        width = draw.randint(1, 4)
        if width <= free[name]:
            run = made(config, width)
            places.start(run, place, width, now_s)
            beside = [key for key, (other, _) in running.items() if other == name]
            met[config.key] = set(beside)
            for key in beside:
                met[key].add(config.key)
            running[config.key], free[name] = (name, run), free[name] - width
        for key in draw.sample([*running], len(running) // 2):
            patience_s = draw.randint(1, 9)
            found = places.find(running[key][0], key)
            assert found is not None
            places.expect(found[1], found[0], now_s, patience_s)
            deadlines[key] = now_s + patience_s
        late = {key for key, deadline_s in deadlines.items() if deadline_s <= now_s}
        assert {run.key for _, run in places.overdue(now_s)} == late
        for key in late | ({draw.choice([*running])} if running else set()):
            name, run = running.pop(key)
            place, found = places.find(name, key)
            assert found is run
            places.end(run, place)
            free[name] += run.width
            deadlines.pop(key, None)
            assert places.find(name, key) is None
            assert run.neighbours == met[key]
        assert {place.node.name: place.free for place in places} == free
        assert places.num_running == len(running)


def test_a_machine_that_is_removed_is_not_overdue_and_its_slots_stay_the_most():
    places, run = Places(), made(grid(1)[0])
    for number, slots in ((0, 2), (1, 3)):
        places.add(node(number, slots))
    place = next(iter(places))
    places.start(run, place, 1, 0.0)
    places.expect(run, place, 0.0, 5.0)
    assert places.remove("node-0") is place
    assert places.remove("node-0") is None
    assert [*places.overdue(9.0)] == []
    assert (len(places), places.most_slots) == (1, 5)
    assert (places.has_host("host-0"), places.has_host("host-1")) == (False, True)


def test_a_run_whose_profile_is_fetched_is_no_neighbour():
    places = Places()
    places.add(node(0, slots=2))
    (place,) = places
    first, second = (made(config) for config in grid(2))
    places.start(first, place, 1, 0.0)
    first.record = record_of(first.config)
    place.release(first)
    places.start(second, place, 2, 1.0)
    assert (first.neighbours, second.neighbours, place.free) == (set(), set(), 0)
    places.end(first, place)
    assert place.free == 0
    places.end(second, place)
    assert place.free == 2
