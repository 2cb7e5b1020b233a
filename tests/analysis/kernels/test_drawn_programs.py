"""What is said of drawn programs is true of them, or said not to be seen.

`drawn_programs.py` draws and simulates, `drawn_truth.py` knows, `drawn_scores.py` compares. For
other seeds: `python -m tests.analysis.kernels.drawn_scores FIRST COUNT`.
"""

from pathlib import Path

import pytest

from tests.analysis.kernels.drawn_machine import recorded, simulate
from tests.analysis.kernels.drawn_plans import draw
from tests.analysis.kernels.drawn_scores import FALSE, scored
from tests.analysis.kernels.drawn_truth import union

FIRST, DRAWS, PARTS = 0, 300, 6

ONCE_FALSE = {
    101: "a device waits for another while the host waits",
    238: "the only whole step says nothing of what passes between steps",
    1012: "a user's own kernels run before the batch of forward is taken",
    1070: "another thread copies the batch and is not backward",
    1177: "another thread copies the batch after a user's own kernels",
    1199: "pieces of backward begin no steps",
    3075: "the file has steps, and none of their launches",
    3116: "ranges are lost, and autograd runs within the optimizer's range",
    5240: "a late graph has kernels on two devices",
    5280: "a compiled kernel runs outside of the steps",
    6243: "a graph of a whole step is launched beside another thread",
    6270: "some collectives run outside of the steps",
}
"""Seeds of which something false was said, and what was not understood."""


@pytest.mark.parametrize("part", range(PARTS))
def test_nothing_false_is_said_of_drawn_programs(part: int, tmp_path: Path) -> None:
    count = DRAWS // PARTS
    made = scored(FIRST + part * count, count, tmp_path)
    false = [(seed, score) for seed, score in made if score.verdict == FALSE]
    assert not false
    assert len({seed for seed, _ in made}) > 0.9 * count  # some files hold no kernel


@pytest.mark.parametrize("seed", ONCE_FALSE)
def test_nothing_false_is_said_where_it_once_was(seed: int, tmp_path: Path) -> None:
    made = scored(seed, 1, tmp_path)
    assert made
    assert not [score for _, score in made if score.verdict == FALSE]


def test_the_simulation_keeps_the_rules_of_streams_and_launches() -> None:
    """A stream runs one job after the other, in the order of launches, none before its launch."""
    for seed in range(0, 60, 3):
        for machine in simulate(draw(seed)):
            free: dict[tuple[int, int], int] = {}
            for job in machine.jobs:
                key = job.act.device, job.act.stream
                assert job.launch.start_ns <= job.start_ns < job.end_ns
                assert free.get(key, 0) <= job.start_ns
                free[key] = job.end_ns


def test_a_cut_file_holds_a_part_of_the_whole() -> None:
    for seed in range(60):
        machine = simulate(draw(seed))[0]
        assert {job.act for job in recorded(machine).jobs} <= {job.act for job in machine.jobs}


def test_unions_of_intervals() -> None:
    assert union([(5, 7), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 7)]
