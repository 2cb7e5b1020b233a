"""Oracle: an allocator that works like PyTorch's, keeps its own counts at every step, and writes
a snapshot.
"""

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cs336.analysis.memory.lifetimes import BEFORE
from cs336.analysis.memory.replay import Replay, replay_device
from cs336.analysis.memory.snapshot import read_snapshot
from tests.analysis.memory.snapshots import (
    MIB,
    SETTINGS,
    Allocator,
    frame,
    snapshot_of,
    use_at_random,
    write,
)

GUESSED = "of a size that the file does not say"


def replay_of(path: Path, content: dict[str, Any], row: int = 0) -> Replay:
    replayed = read_snapshot(write(path, content))
    return replay_device(replayed.devices[row], replayed.settings)


def active_bytes(replayed: Replay) -> NDArray[np.int64]:
    return replayed.curve(replayed.allocations.num_bytes, replayed.allocations.end)


def in_use(replayed: Replay, moment: int) -> list[tuple[int, int, int]]:
    """Address, block size and requested size of each block."""
    rows = replayed.allocations
    is_there = (rows.start < moment) & (moment <= rows.end)
    columns = (rows.address, rows.num_bytes, rows.requested_bytes)
    return list(zip(*(column[is_there].tolist() for column in columns), strict=True))


def check(replayed: Replay, truth: Allocator, are_blocks_known: bool = True) -> None:
    """Compare all counts at all moments, and the blocks in use at some moments."""
    assert replayed.notes == () or (
        not are_blocks_known and len(replayed.notes) == 1 and GUESSED in replayed.notes[0]
    )
    assert len(replayed.memory.events) == len(truth.truth) - 1
    curves = {"requested": replayed.requested_bytes, "reserved": replayed.reserved_bytes}
    if are_blocks_known:
        curves |= {"allocated": replayed.allocated_bytes, "active": active_bytes(replayed)}
    for name, curve in curves.items():
        np.testing.assert_array_equal(
            curve, [getattr(moment, name) for moment in truth.truth], err_msg=name
        )
    for moment in {
        0,
        int(replayed.allocated_bytes.argmax()),
        len(truth.truth) - 1,
        *range(0, len(truth.truth), 97),
    }:
        expected = sorted(truth.truth[moment].in_use)
        if are_blocks_known:
            assert sorted(in_use(replayed, moment)) == expected
        assert sorted(row[::2] for row in in_use(replayed, moment)) == [
            row[::2] for row in expected
        ]


@pytest.mark.parametrize("is_expandable", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_counts_are_those_of_the_allocator(tmp_path: Path, seed: int, is_expandable: bool) -> None:
    made = Allocator(is_expandable=is_expandable)
    made.record()
    use_at_random(made, random.Random(seed), 1500)
    check(replay_of(tmp_path / "s", snapshot_of(made)), made)


@pytest.mark.parametrize("is_expandable", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_a_recording_that_begins_in_the_middle(
    tmp_path: Path, seed: int, is_expandable: bool
) -> None:
    rng = random.Random(seed)
    made = Allocator(is_expandable=is_expandable)
    use_at_random(made, rng, 500)
    made.record()
    use_at_random(made, rng, 700)
    replayed = replay_of(tmp_path / "s", snapshot_of(made))
    check(replayed, made, are_blocks_known=is_expandable)
    assert replayed.requested_bytes[0] > 0
    throughout = frozenset.intersection(*(moment.in_use for moment in made.truth))
    rows = np.flatnonzero(replayed.is_held_throughout)
    assert {int(replayed.allocations.address[row]) for row in rows} >= {
        address for address, *_ in throughout
    }
    shortfall = np.array([moment.active for moment in made.truth]) - active_bytes(replayed)
    num_guessed = ((replayed.allocations.start == BEFORE) & ~replayed.is_held_throughout).sum()
    assert shortfall.min() >= 0
    assert shortfall.max() <= num_guessed * MIB
    assert shortfall[-1] == 0


@pytest.mark.parametrize("seed", range(2))
def test_a_ring_that_dropped_its_oldest_events(tmp_path: Path, seed: int) -> None:
    made = Allocator()
    made.record()
    stacks = [[frame("f")]]
    use_at_random(made, random.Random(seed), 1200, stacks)
    made.keep_last(400)
    replayed = replay_of(tmp_path / "s", snapshot_of(made))
    np.testing.assert_array_equal(
        replayed.requested_bytes, [moment.requested for moment in made.truth]
    )
    np.testing.assert_array_equal(
        replayed.reserved_bytes, [moment.reserved for moment in made.truth]
    )
    are_held = bool(frozenset.intersection(*(moment.in_use for moment in made.truth)))
    assert (replayed.num_held_with_stack > 0) == are_held
    assert are_held or seed == 1


def test_out_of_memory(tmp_path: Path) -> None:
    made = Allocator(limit_bytes=300 * MIB)
    made.record()
    use_at_random(made, random.Random(3), 1500)
    replayed = replay_of(tmp_path / "s", snapshot_of(made))
    check(replayed, made)
    assert replayed.failed_requests == [
        row for row, event in enumerate(made.events or []) if event["action"] == "oom"
    ]
    assert len(replayed.failed_requests) > 5


def hand_made(
    *events: tuple[str, int, int], blocks: tuple[tuple[int, int], ...] = ()
) -> dict[str, Any]:
    """A snapshot with these events (action, address, size) and these blocks (address, size) in
    use at the end.
    """
    trace = [
        {"action": action, "addr": address, "size": size, "stream": 0, "time_us": row}
        for row, (action, address, size) in enumerate(events)
    ]
    replayed = [
        {"address": address, "size": 512, "requested_size": size, "state": "active_allocated"}
        for address, size in blocks
    ]
    segment = {"device": 0, "address": 0, "total_size": 2 * MIB, "stream": 0, "blocks": replayed}
    return {"segments": [segment], "device_traces": [trace]}


FREED = ("free_requested", 0, 9), ("free_completed", 0, 9)


TWICE = ("alloc", 0, 9)
CONTRADICT, ENDED = "contradict each other", "At the end "


@pytest.mark.parametrize(
    ("content", "requested", "note"),
    [
        (hand_made(TWICE, TWICE, *FREED), [0, 9, 9, 9, 0], f"{CONTRADICT} 1 time"),
        (hand_made(TWICE, *FREED, *FREED), [0, 9, 9, 0, 0, 0], f"{CONTRADICT} 2 times"),
        (hand_made(("alloc", 0, 8), *FREED), [0, 8, 8, 0], CONTRADICT),
        (hand_made(TWICE, FREED[1], FREED[0]), [0, 9, 0, 0], CONTRADICT),
        (hand_made(TWICE, FREED[1]), [0, 9, 0], None),
        (hand_made(TWICE, FREED[0]), [0, 9, 0], None),
        (hand_made(*FREED), [9, 9, 0], None),
        (hand_made(TWICE), [0, 9], f"{ENDED}9 bytes had gone"),
        (hand_made(TWICE, *FREED, blocks=((0, 7),)), [0, 9, 9, 0], "7 bytes had come"),
        (
            hand_made(("alloc", 256, 9), ("free_completed", 256, 9), blocks=((0, 7),)),
            [0, 9, 0],
            "7 bytes had come",
        ),
        (
            hand_made(("alloc", 0, 600), ("free_completed", 0, 600), blocks=((512, 7),)),
            [0, 600, 0],
            "7 bytes had come",
        ),
        (hand_made(("alloc", 512, 9), blocks=((0, 7), (512, 9))), [7, 16], None),
        (
            hand_made(("segment_free", 0, 4 * MIB), ("segment_alloc", 0, 9 * MIB)),
            [0, 0, 0],
            "Segments are missing",
        ),
    ],
)
def test_contradictions_are_noted(
    tmp_path: Path, content: dict[str, Any], requested: list[int], note: str | None
) -> None:
    replayed = replay_of(tmp_path / "s", content)
    assert replayed.requested_bytes.tolist() == requested
    assert [note in text for text in replayed.notes] == [True] if note else replayed.notes == ()


@pytest.mark.parametrize("seed", range(3))
def test_pairs_of_events_are_those_that_torch_finds(tmp_path: Path, seed: int) -> None:
    from torch.cuda._memory_viz import calc_active, filter_alloc_free_pairs

    made = Allocator()
    rng = random.Random(seed)
    use_at_random(made, rng, 300)
    made.record()
    use_at_random(made, rng, 600)
    content = snapshot_of(made)
    replayed = replay_of(tmp_path / "s", content)
    (left,) = filter_alloc_free_pairs(copy.deepcopy(content))["device_traces"]
    rows, num_events = replayed.allocations, len(replayed.memory.events)
    alive = (rows.start != BEFORE) & (rows.free_requested == num_events)
    assert sorted(rows.address[alive].tolist()) == sorted(
        event["addr"] for event in left if event["action"] == "alloc"
    )
    earlier = (
        (rows.start == BEFORE)
        & (rows.free_requested < num_events)
        & (rows.free_requested != BEFORE)
    )
    assert sorted(rows.address[earlier].tolist()) == sorted(
        event["addr"] for event in left if event["action"] == "free_requested"
    )
    assert replayed.allocated_bytes[-1] == sum(
        calc_active(segment) for segment in content["segments"]
    )


@pytest.mark.parametrize("seed", range(6))
def test_curves_of_any_events_against_brute_force(tmp_path: Path, seed: int) -> None:
    """For events that contradict each other, the curves are still the sums over the allocations."""
    rng = random.Random(seed)
    actions = ["alloc", "free_requested", "free_completed", "segment_alloc", "segment_free"]
    content = hand_made(
        *(
            (rng.choice(actions), 512 * rng.randrange(12), rng.choice([5, 600, 2 * MIB]))
            for _ in range(300)
        ),
        blocks=tuple((512 * place, 7) for place in range(0, 30, 2)),
    )
    replayed = replay_of(tmp_path / "s", content)
    rows, active = replayed.allocations, active_bytes(replayed)
    for moment in range(301):
        used = [i for i in range(len(rows)) if rows.start[i] < moment <= rows.end[i]]
        owned = [i for i in used if moment <= rows.free_requested[i]]
        assert replayed.requested_bytes[moment] == rows.requested_bytes[used].sum()
        assert active[moment] == rows.num_bytes[used].sum()
        assert replayed.allocated_bytes[moment] == rows.num_bytes[owned].sum()
    assert any("contradict" in note for note in replayed.notes)


def test_blocks_are_whole_beyond_the_largest_that_are_split(tmp_path: Path) -> None:
    """Without max_split_size a rest of 2 MiB stays free; with it, larger requests get the whole
    block.
    """
    made = Allocator()
    made.record()
    address = made.malloc(14 * MIB)
    assert address is not None
    made.free(address)
    address = made.malloc(12 * MIB)
    assert address is not None
    made.free(address)
    content = snapshot_of(made)
    replayed = replay_of(tmp_path / "s", content)
    assert sorted(replayed.allocations.num_bytes.tolist()) == [12 * MIB, 14 * MIB]
    content["allocator_settings"] = {**SETTINGS, "max_split_size": 10 * MIB}
    replayed = replay_of(tmp_path / "s", content)
    assert replayed.allocations.num_bytes.tolist() == [14 * MIB, 14 * MIB]
