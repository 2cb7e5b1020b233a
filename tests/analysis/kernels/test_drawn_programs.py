"""What is said of drawn programs is true of them, or said not to be seen.

`drawn_plans.py` draws from the options of `drawn_programs.toml`, `drawn_programs.py` says what is
done, `drawn_machine.py` takes its time, `drawn_files.py` writes it,
`drawn_truth.py` knows, `drawn_scores.py` compares. For other seeds:
`python -m tests.analysis.kernels.drawn_scores FIRST COUNT`.
"""

import re
from pathlib import Path

import pytest

from tests.analysis.kernels.drawn_machine import recorded
from tests.analysis.kernels.drawn_plans import Pause, Plan, draw
from tests.analysis.kernels.drawn_programs import simulate
from tests.analysis.kernels.drawn_scores import FALSE, scored, scores
from tests.analysis.kernels.drawn_truth import union

FIRST, DRAWS, PARTS = 0, 300, 6

_PLANS = """
a device waits for another while the host waits: seed=101, kind="training", style="torch",
  limit="copies", steps=5, micro_batches=2, loader="get_batch", zero_grad="first", optimizer="",
  steps_of_micro=True, compiled=True, devices=2, modules=True, around="training", decoy="backward
  compatibility"
the only whole step says nothing of what passes between steps: seed=238, kind="server",
  style="vllm", limit="data", steps=2, reads_loss=False, is_sharded=True, modules=True,
  is_mixed=True, cut=(0.3, 0.7)
a user's own kernels run before the batch of forward is taken: seed=1012, kind="training",
  style="none", limit="data", is_nsys=True, steps=2, micro_batches=4, layers=3,
  loader="_SingleProcess", zero_grad="first", compiled=True, queue=24, decoy="data parallel
  group", is_mixed=True, dropped="call"
another thread copies the batch and is not backward: seed=1070, kind="training", style="words",
  limit="data", is_nsys=True, evaluates=True, compiled=True, graph="step", side_stream=True,
  is_sharded=True, hides=Pause.ALLOCATION, around="training", decoy="lr_scheduler.step",
  prefetches=True, is_mixed=True, cut=(0.25, 1.0)
another thread copies the batch after a user's own kernels: seed=1177, kind="training",
  style="none", limit="data", is_nsys=True, steps=3, layers=4, loader="_SingleProcess",
  zero_grad="last", optimizer="", reads_loss=False, queue=24, is_sharded=True,
  hides=Pause.COLLECTOR, decoy="lr_scheduler.step", prefetches=True
pieces of backward begin no steps: seed=1199, kind="pipeline", style="deepseek", limit="copies",
  steps=5, loader="_SingleProcess", compiled=True, queue=24, around="training", shift_ns=-400000
the file has steps, and none of their launches: seed=3075, kind="inference", style="ours",
  limit="copies", steps=2, loader="get_batch", graph="step", queue=24, decoy="lr_scheduler.step",
  is_mixed=True, cut=(0.3, 0.7), dropped="range", fills=True
ranges are lost, and autograd runs within the optimizer's range: seed=3116, kind="training",
  style="lightning", limit="data", steps=3, layers=4, loader="_MultiProcessing",
  zero_grad="between", clips=True, decoy="lr_scheduler.step", prefetches=True, dropped="range"
a late graph has kernels on two devices: seed=5240, kind="training", style="iteration",
  limit="data", steps=3, layers=3, loader="_MultiProcessing", zero_grad="last",
  optimizer="kernels", clips=True, graph="parts", queue=24, devices=2, modules=True,
  hides=Pause.RANGE, is_mixed=True, cut=(0.3, 0.7)
a compiled kernel runs outside of the steps: seed=5280, kind="training", style="lightning",
  zero_grad="between", limit="host", steps=2, layers=4, loader="_MultiProcessing", clips=True,
  compiled=True, is_sharded=True, modules=True, decoy="data parallel group", is_mixed=True,
  cut=(0.3, 0.7), dropped="kernel", shift_ns=3000000, fills=True
a graph of a whole step is launched beside another thread: seed=6243, kind="training",
  style="deepspeed", limit="host", is_nsys=True, steps=3, layers=4, zero_grad="last",
  optimizer="plain", checkpoints=True, graph="step", modules=True, around="epoch 0",
  prefetches=True, dropped="range", shift_ns=-400000, fills=True
some collectives run outside of the steps: seed=6270, kind="training", style="none",
  limit="ranks", layers=3, loader="_SingleProcess", zero_grad="last", optimizer="plain", ranks=4,
  is_sharded=True, slow_rank=1, modules=True, hides=Pause.NOTHING, decoy="backward compatibility",
  reads_in_forward=True, fills=True
the device waits outside of the steps, which are pieces of a cut file: seed=7231, kind="training",
  style="deepspeed", is_nsys=True, steps=3, micro_batches=4, loader="_MultiProcessing",
  zero_grad="first", optimizer="", evaluates=True, reads_loss=False, queue=24, is_sharded=True,
  hides=Pause.NOTHING, reads_in_forward=True, cut=(0.3, 0.7), fills=True
a copy whose call is lost does not put the wait for it in a phase: seed=4, kind="training",
  style="lightning", limit="copies", steps=5, zero_grad="between", dropped="call", cut=(0.0, 0.8),
  is_pageable=True
a report of nsys shows no loader of PyTorch, so a short wait for data is a late launch: seed=2156,
  kind="inference", style="torch", is_nsys=True, loader="_MultiProcessing", queue=24,
  around="epoch 0"
a kernel without its launch is in no phase: seed=0, kind="training", style="lightning",
  is_nsys=True, steps=2, loader="get_batch", zero_grad="between", devices=2, dropped="call"
"""
ONCE_FALSE = dict(re.findall(r"^(\w[^:]*): ((?:.|\n )*)", _PLANS, re.M))
"""What was not understood once or is seldom drawn, and the plan of a program that shows it."""


@pytest.mark.parametrize("part", range(PARTS))
def test_nothing_false_is_said_of_drawn_programs(part: int, tmp_path: Path) -> None:
    count = DRAWS // PARTS
    made = scored(FIRST + part * count, count, tmp_path)
    false = [(seed, score) for seed, score in made if score.verdict == FALSE]
    assert not false
    assert len({seed for seed, _ in made}) > 0.9 * count  # some files hold no kernel


@pytest.mark.parametrize("cause", ONCE_FALSE)
def test_nothing_false_is_said_where_it_once_was(cause: str, tmp_path: Path) -> None:
    text = " ".join(ONCE_FALSE[cause].split())
    plan = eval(f"Plan({text})", {"Plan": Plan, "Pause": Pause})
    made = scores(plan, tmp_path)
    assert made
    assert not [score for score in made if score.verdict == FALSE]


def test_the_simulation_keeps_the_rules_of_streams_and_launches() -> None:
    """A stream runs one job after the other, in the order of launches, none before its launch."""
    for seed in range(0, 60, 3):
        for machine in simulate(draw(seed)):
            free: dict[tuple[int, int], int] = {}
            for job in machine.jobs:
                key = job.device, job.stream
                assert job.launch.start_ns <= job.start_ns < job.end_ns
                assert free.get(key, 0) <= job.start_ns
                free[key] = job.end_ns


def test_a_cut_file_holds_a_part_of_the_whole() -> None:
    for seed in range(60):
        machine = simulate(draw(seed))[0]
        kept = {id(job.launch) for job in recorded(machine).jobs}
        assert kept <= {id(job.launch) for job in machine.jobs}


def test_unions_of_intervals() -> None:
    assert union([(5, 7), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 7)]
