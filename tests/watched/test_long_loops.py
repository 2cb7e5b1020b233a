"""A loop of many steps: what watching keeps and costs does not grow."""

import gc
import time
import tracemalloc

import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from cs336 import watch
from cs336.config import Phase
from cs336.record import encode_record
from cs336.watched.steps import MAX_KEPT_STEPS

MAX_RECORD_BYTES = 5e6


class Loop:
    """A loop whose steps have all phases, and data between them."""

    def __init__(self, output):
        torch.set_num_threads(1)
        self.model = nn.Sequential(nn.Embedding(5, 2), nn.Linear(2, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.loader = DataLoader(torch.zeros(1000, 3, dtype=torch.int64), batch_size=None)
        self.batches = iter(self.loader)
        self.watched = watch(self.model, self.optimizer, output=output)

    def run(self, steps):
        """Run steps, and return the processor time of each."""
        begun_s = time.process_time()
        for _ in range(steps):
            batch = next(self.batches, None)
            if batch is None:
                self.batches = iter(self.loader)
                batch = next(self.batches)
            with self.watched.step():
                self.model(batch).sum().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
        return (time.process_time() - begun_s) / steps


def kept_bytes():
    """Bytes that the code of `watch` has allocated and that are kept."""
    gc.collect()
    ours = tracemalloc.Filter(inclusive=True, filename_pattern="*/watched/*")
    snapshot = tracemalloc.take_snapshot().filter_traces([ours])
    return sum(trace.size for trace in snapshot.traces)


def test_what_is_kept_does_not_grow(tmp_path, monkeypatch):
    monkeypatch.setattr("cs336.watched.steps.MAX_KEPT_STEPS", 100)
    loop = Loop(tmp_path)
    loop.run(150)
    tracemalloc.start()
    try:
        loop.run(150)
        before = kept_bytes()
        loop.run(600)
        after = kept_bytes()
    finally:
        tracemalloc.stop()
    # one object of 16 bytes kept of each step would be more
    assert after - before < 600 * 16
    assert len(loop.watched.record().measurement(Phase.STEP).times_s) == 100


def test_the_record_of_a_long_loop_is_small(tmp_path):
    loop = Loop(tmp_path)
    loop.run(MAX_KEPT_STEPS + 100)
    record = loop.watched.record()
    assert len(record.measurement(Phase.STEP).times_s) == MAX_KEPT_STEPS
    assert len(record.seen.between_data_s) == MAX_KEPT_STEPS
    assert len(encode_record(record)) < MAX_RECORD_BYTES


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_200_000_steps(tmp_path):
    loop, steps = Loop(tmp_path), 20_000
    process = psutil.Process()
    costs, resident = [], []
    for _ in range(10):
        costs.append(loop.run(steps))
        gc.collect()
        resident.append(process.memory_info().rss)
    print(f"processor time of a step: {[round(1e6 * cost, 1) for cost in costs]} us")
    # the fastest of the last ones: another program can only make it longer
    assert min(costs[-3:]) < 1.1 * costs[0]
    print(f"resident memory: {[round(size / 1e6) for size in resident]} MB")
    # after the steps that are kept are full, in the first of these
    assert resident[-1] - resident[1] < 5e6
    size = len(encode_record(loop.watched.record()))
    print(f"record: {size:,} bytes")
    assert size < MAX_RECORD_BYTES
