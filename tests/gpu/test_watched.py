"""Watched loops on a GPU: an independent clock, and what watching costs."""

import contextlib
from dataclasses import replace
from statistics import fmean, median
from time import perf_counter
from typing import ClassVar

import pytest
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from cs336 import watch
from cs336.config import SIZES, Attention, Device, OptimizerKind, Phase, Precision, RunConfig
from cs336.measure.run import measure
from cs336.measure.step import TrainingStep
from cs336.model.trainable import cross_entropy
from cs336.model.transformer import TransformerLM

pytestmark = [pytest.mark.gpu, pytest.mark.alone]
CONFIG = RunConfig(
    size="medium",
    model=replace(SIZES["medium"], attention=Attention.SDPA),
    batch_size=32,
    precision=Precision.BF16,
    optimizer=OptimizerKind.FUSED,
    device=Device.CUDA,
    measured_steps=20,
)
STEPS = 20


def train(watched, model, optimizer, batches, steps=STEPS, micro_batches=1):
    """Train as most loops do; return the seconds of a step by a clock that waits for the GPU at
    both ends.
    """
    torch.cuda.synchronize()
    start = perf_counter()
    for _ in range(steps):
        with watched.step() if watched else contextlib.nullcontext():
            for _ in range(micro_batches):
                tokens, targets = batches()
                with torch.autocast("cuda", torch.bfloat16):
                    loss = cross_entropy(model(tokens), targets, CONFIG.model.vocab_size)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.cuda.synchronize()
    return (perf_counter() - start) / steps


@pytest.fixture(scope="module")
def loop():
    torch.manual_seed(0)
    batches = TrainingStep(CONFIG).batches
    with torch.device("cuda"):
        model = TransformerLM(CONFIG.model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    train(None, model, optimizer, batches, 10)
    return model, optimizer, batches


def mean(record, phase):
    return record.measurement(phase).mean_s


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_steps_and_what_is_between_them_are_the_loop(loop, micro_batches):
    watched = watch(*loop[:2], warmup_steps=1)
    train(watched, *loop, steps=1)
    step_s = train(watched, *loop, micro_batches=micro_batches)
    record = watched.record()
    between_s = sum(record.between_s) / STEPS
    print(
        f"step {1e3 * mean(record, Phase.STEP):.3f} + between {1e3 * between_s:.3f} ms, clock "
        f"{1e3 * step_s:.3f} ms"
    )
    assert mean(record, Phase.STEP) + between_s == pytest.approx(step_s, rel=0.01)
    assert record.memory.peak_allocated_bytes > 4 * 4 * record.num_parameters
    watched.remove()


def test_phases_are_those_of_the_benchmark(loop):
    expected = measure(CONFIG)
    watched = watch(*loop[:2], warmup_steps=0)
    train(watched, *loop)
    result = watched.record()
    watched.remove()
    ours, theirs = (
        {row.phase: median(row.times_s) for row in record.measurements}
        for record in (result, expected)
    )
    print(f"watched {ours}, benchmark {theirs}")
    for phase in (Phase.BACKWARD, Phase.OPTIMIZER):
        assert ours[phase] == pytest.approx(theirs[phase], rel=0.03)
    # the loss is a part of the benchmark's forward, and of what the loop does besides
    assert ours[Phase.FORWARD] <= 1.03 * theirs[Phase.FORWARD]
    assert ours[Phase.FORWARD] + ours[Phase.OTHER] >= 0.97 * theirs[Phase.FORWARD]


def test_steps_of_a_trainer_are_those_of_a_clock(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from examples.watch_trainer import Watched

    class Clocked(Watched):
        times_s: ClassVar[list[float]] = []

        def on_step_begin(self, *arguments, **others):
            torch.cuda.synchronize()
            self.begun_s = perf_counter()
            super().on_step_begin(*arguments, **others)

        def on_step_end(self, *arguments, **others):
            super().on_step_end(*arguments, **others)
            torch.cuda.synchronize()
            self.times_s.append(perf_counter() - self.begun_s)

    tokens = [{"input_ids": torch.arange(512), "labels": torch.arange(512)}] * 64
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=1024, n_layer=12, n_head=16)
    )
    arguments = transformers.TrainingArguments(
        tmp_path,
        per_device_train_batch_size=16,
        max_steps=20,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    watched = Clocked(warmup_steps=5, output=tmp_path)
    transformers.Trainer(
        model=model, args=arguments, train_dataset=tokens, callbacks=[watched]
    ).train()
    step_s = mean(watched.watched.record(), Phase.STEP)
    print(f"step {1e3 * step_s:.3f} ms, clock {1e3 * fmean(Clocked.times_s[5:]):.3f} ms")
    assert step_s == pytest.approx(fmean(Clocked.times_s[5:]), rel=0.01)


def train_on_a_rank(rank, directory):
    """Steps of DDP on two ranks, watched; the file says the mean of a step by `watch` and by a
    clock (s).
    """
    torch.cuda.set_device(rank)
    distributed.init_process_group(
        "nccl", init_method=f"file://{directory}/meet", rank=rank, world_size=2
    )
    with torch.device("cuda"):
        model = TransformerLM(CONFIG.model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    shared, batches = DistributedDataParallel(model), TrainingStep(CONFIG).batches
    train(None, shared, optimizer, batches, 10)
    watched = watch(shared, optimizer, warmup_steps=1, output=directory)
    train(watched, shared, optimizer, batches, 1)
    clock_s = train(watched, shared, optimizer, batches)
    record = watched.record()
    (directory / str(rank)).write_text(
        f"{mean(record, Phase.STEP) + sum(record.between_s) / STEPS} {clock_s}"
    )
    distributed.destroy_process_group()


def test_steps_of_two_ranks_are_those_of_their_clocks(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    torch.multiprocessing.spawn(train_on_a_rank, (tmp_path,), 2)
    for rank in range(2):
        found_s, clock_s = map(float, (tmp_path / str(rank)).read_text().split())
        print(f"rank {rank}: {1e3 * found_s:.3f} ms watched, {1e3 * clock_s:.3f} ms by the clock")
        assert found_s == pytest.approx(clock_s, rel=0.01)
