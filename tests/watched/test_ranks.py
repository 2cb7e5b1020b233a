"""Two processes train together; the record says which of them is slow, and that gradients are
averaged in every micro-step.
"""

import contextlib
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cs336 import watch
from cs336.analysis.loop_times import loop_sentences
from cs336.record import load_records

LAG_S, MICRO_STEPS = 0.05, 3


def train(rank, folder, slow_rank, has_no_sync):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched = watch(model, optimizer, warmup_steps=1, output=folder)
    for _ in range(12):
        with watched.step():
            for micro_step in range(MICRO_STEPS):
                is_quiet = has_no_sync and micro_step < MICRO_STEPS - 1
                with model.no_sync() if is_quiet else contextlib.nullcontext():
                    loss = model(torch.ones(2, 4)).sum()
                    if rank == slow_rank and micro_step == 0:
                        time.sleep(LAG_S)
                    loss.backward()
            optimizer.step()
    watched.report()
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize(("slow_rank", "has_no_sync"), [(0, True), (1, False)])
def test_the_slow_rank_is_named_in_the_one_record(slow_rank, has_no_sync, tmp_path):
    torch.multiprocessing.start_processes(
        train, (tmp_path, slow_rank, has_no_sync), nprocs=2, start_method="fork"
    )
    (record,), problems = load_records(tmp_path / "e2e_benchmark/mine/runs")
    assert not problems
    assert record.seen.rank.rank == 0
    assert [rank.rank for rank in record.seen.other_ranks] == [1]
    own_s = [record.seen.rank.own_s, record.seen.other_ranks[0].own_s]
    assert own_s[slow_rank] >= LAG_S
    assert own_s[slow_rank] > own_s[1 - slow_rank]
    assert record.seen.syncs_per_update == (1 if has_no_sync else MICRO_STEPS)
    sentences = " ".join(loop_sentences(record))
    assert f"rank {slow_rank} is slow" in sentences
    assert ("no_sync" in sentences) is not has_no_sync
