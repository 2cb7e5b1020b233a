"""Three processes train together; the record says which of them is slow, which one came later to
single steps, and that gradients are averaged in every micro-step.
"""

import contextlib
import importlib
import random
import statistics
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cs336 import watch
from cs336.analysis.loop_causes import unseen_ranks, with_later_ranks
from cs336.analysis.loop_times import loop_sentences
from cs336.config import Phase
from cs336.loop_record import Cause, LoopRank, LoopRecord
from cs336.measure.clock import StepTimes
from cs336.record import load_records
from cs336.watched.marks import WatchedStep
from cs336.watched.pauses import Pauses
from cs336.watched.ranks import Ranks
from cs336.watched.slow_steps import SlowSteps
from cs336.watched.tokens import NO_TOKENS

WORLD, LAG_S, MICRO_STEPS = 3, 0.03, 3
LOOPS = {"first_is_slow": (0, True), "second_is_slow": (1, False)}
"""By name, the rank that is slow in every step, and whether the loop uses `no_sync`."""
SLOW_IMPORTS = ("torch._dynamo", "scipy.special", "cs336.report.terminal", "cs336.sweep.keep")
"""Modules that DistributedDataParallel and a report import, for seconds in each process."""
LATE_S, LATE_STEPS = 0.3, 40
LATE = {7: {1}, 12: {2}, 18: {0}, 29: {0, 1, 2}}
"""By step, the ranks that come late in the loop "single_steps"."""


def trained(rank, folder, name, steps, micro_steps, lag_s, has_no_sync=True):
    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched = watch(model, optimizer, name=name, warmup_steps=1, output=folder)
    for number in range(-1, steps):
        with watched.step():
            for micro_step in range(micro_steps):
                is_quiet = has_no_sync and micro_step < micro_steps - 1
                with model.no_sync() if is_quiet else contextlib.nullcontext():
                    loss = model(torch.ones(2, 4)).sum()
                    if micro_step == 0:
                        time.sleep(lag_s(number))
                    loss.backward()
            optimizer.step()
    dist.barrier()
    watched.report(page=False)


def run_rank(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD
    )
    for name, (slow_rank, has_no_sync) in LOOPS.items():
        lag_s = LAG_S if rank == slow_rank else 0.0
        trained(rank, folder, name, 12, MICRO_STEPS, lambda _, lag_s=lag_s: lag_s, has_no_sync)

    def late_s(number):
        return LATE_S if rank in LATE.get(number, ()) else 0.0

    trained(rank, folder, "single_steps", LATE_STEPS, 1, late_s)
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What three processes have written."""
    folder = tmp_path_factory.mktemp("ranks")
    for module in SLOW_IMPORTS:
        importlib.import_module(module)
    torch.multiprocessing.start_processes(run_rank, (folder,), nprocs=WORLD, start_method="fork")
    return folder


def record_of(folder: Path, name: str):
    (record,), problems = load_records(folder / "e2e_benchmark" / name / "runs")
    assert not problems
    return record


@pytest.mark.parametrize("name", LOOPS)
def test_the_slow_rank_is_named_in_the_one_record(name, folder):
    slow_rank, has_no_sync = LOOPS[name]
    record = record_of(folder, name)
    assert record.seen.rank.rank == 0
    assert [rank.rank for rank in record.seen.other_ranks] == [1, 2]
    own_s = [rank.own_s for rank in (record.seen.rank, *record.seen.other_ranks)]
    assert own_s[slow_rank] >= LAG_S
    assert max(own_s) == own_s[slow_rank]
    assert record.seen.syncs_per_update == (1 if has_no_sync else MICRO_STEPS)
    sentences = " ".join(loop_sentences(record))
    assert f"rank {slow_rank} is slow" in sentences
    assert ("no_sync" in sentences) is not has_no_sync
    # rank 0 alone multiplies 2 rows by a 4 x 4 matrix, forward and for the gradient of the matrix
    assert record.seen.flops.per_step == MICRO_STEPS * 2 * (2 * 2 * 4 * 4)
    assert f"rank 0 of {WORLD}: times, tokens and FLOPs are those of this rank alone" in sentences


def later_rank(pauses):
    """The seconds and the details of the later rank among the pauses."""
    (told,) = [pause for pause in pauses if pause.cause is Cause.RANK] or [None]
    return (0.0, "") if told is None else (told.seconds, told.details[0])


def test_a_rank_that_comes_late_to_single_steps_is_named_for_them(folder):
    seen = record_of(folder, "single_steps").seen
    steps = {step.number: step for step in with_later_ranks(seen)}
    assert LATE.keys() <= steps.keys()
    for number, late in LATE.items():
        seconds, detail = later_rank(steps[number].pauses)
        if 0 in late:
            assert seconds < LATE_S / 2
        else:
            (rank,) = late
            assert detail == f"rank {rank}: other"
            assert LATE_S / 2 < seconds <= steps[number].excess_s


class Group:
    """Ranks whose steps are made: each has a time of its own, and all wait for the latest."""

    def __init__(self, seed):
        chance = random.Random(seed)
        self.world = chance.randint(2, 5)
        self.usual_s = [chance.uniform(0.02, 0.03) for _ in range(self.world)]
        self.first = [chance.randrange(3) for _ in range(self.world)]
        """Measured steps that a rank has forgotten."""
        self.number = chance.randint(40, 60)
        self.own_s = []
        self.waited_s = []
        self.late = {}
        """By step, the seconds by which single ranks are late."""
        for number in range(self.number):
            own_s = [usual_s * chance.gauss(1, 0.002) for usual_s in self.usual_s]
            late = {}
            if chance.random() < 0.15 and number > 3:
                for rank in chance.sample(range(self.world), chance.choice([1, 1, 2])):
                    late[rank] = chance.uniform(0.02, 0.2)
                    own_s[rank] += late[rank]
            if late:
                self.late[number] = late
            self.own_s.append(own_s)
            self.waited_s.append([max(own_s) - seconds for seconds in own_s])

    def steps(self, rank):
        for own_s, waited_s in zip(self.own_s, self.waited_s, strict=True):
            phases_s = {
                Phase.FORWARD: own_s[rank] - 0.001,
                Phase.BACKWARD: 0.04 + waited_s[rank],
                Phase.OPTIMIZER: 0.002,
            }
            times = StepTimes(
                step_s=sum(phases_s.values()), host_s=0.0, phases_s=phases_s, host_phases_s={}
            )
            yield WatchedStep(times=times, between_s=0.001, between_data_s=0.0, tokens=NO_TOKENS)

    def rank(self, rank):
        """What this rank tells, and its slow steps."""
        slow_steps = SlowSteps(Pauses(), None)
        steps = list(self.steps(rank))
        for number, step in enumerate(steps):
            slow_steps.steps_read(number, [step])
        kept = steps[self.first[rank] :]
        ranks = Ranks("made", [], slow_steps)
        ranks._rank, ranks._world_size, ranks._has_own = rank, self.world, True
        return ranks.rank(kept), slow_steps.slow_steps((), kept)


@pytest.mark.parametrize("seed", range(20))
def test_what_a_later_rank_explains_is_what_the_made_ranks_waited_for_it(seed):
    group = Group(seed)
    told = [group.rank(rank) for rank in range(group.world)]
    here, slow = told[0]
    others = tuple(rank for rank, _ in told[1:])
    usual_wait_s = statistics.median(waited_s[0] for waited_s in group.waited_s)
    seen = LoopRecord(slow_steps=slow, rank=here, other_ranks=others)
    named = set()
    for step in with_later_ranks(seen):
        number = step.number + group.first[0]
        seconds, detail = later_rank(step.pauses)
        own_s = group.own_s[number]
        waited_s = group.waited_s[number][0] - usual_wait_s
        # 0.2 % of a rank's time is chance, of which the largest of many is four times as much
        assert seconds == pytest.approx(max(waited_s, 0.0), abs=0.1 * step.excess_s + 0.001)
        if detail:
            named.add(number)
            latest = own_s.index(max(own_s))
            assert detail == f"rank {latest}: forward"
    # a rank that is late by 20 ms may still come before the slowest, which takes 10 ms more
    assert named >= {
        number for number, late in group.late.items() if 0 not in late and max(late.values()) > 0.04
    }


def test_without_the_files_of_other_ranks_no_later_one_is_named():
    group = Group(0)
    here, slow = group.rank(0)
    told_nothing = LoopRank(rank=1, world_size=group.world)
    for others in ((), (told_nothing,)):
        seen = LoopRecord(slow_steps=slow, rank=here, other_ranks=others)
        assert with_later_ranks(seen) == slow
        (sentence,) = unseen_ranks(seen)
        assert f"0 of {group.world} ranks" in sentence
    nobody = replace(here, own_s=None, late_steps=())
    others = tuple(group.rank(rank)[0] for rank in range(1, group.world))
    assert with_later_ranks(LoopRecord(slow_steps=slow, rank=nobody, other_ranks=others)) == slow
