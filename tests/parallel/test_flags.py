"""The flags of runs on several ranks: what excludes what, and what a benchmark and a sweep make of them."""

from dataclasses import replace

import pytest

from cs336_systems.cli import benchmark
from cs336_systems.commands.flags import parse
from cs336_systems.commands.sweep import SweepArguments, default_name
from cs336_systems.config import Device
from cs336_systems.measure.nvml import Gpu

pytestmark = pytest.mark.timeout(280)
FLAGS = [
    "--device", "cpu", "--warmup-steps", "2", "--measured-steps", "2", "--vocab-size", "37", "--context-length", "8",
    "--batch-size", "2",
]  # fmt: skip
SHAPE = ["--d-model", "24", "--d-ff", "40", "--num-layers", "1", "--num-heads", "2"]


def test_more_ranks_than_gpus_are_refused_before_anything_starts(monkeypatch, capsys, tmp_path):
    gpu = Gpu(index=0, uuid="GPU-1", name="NVIDIA H200", memory_bytes=2**37, driver="580")
    other = replace(gpu, index=1, uuid="GPU-2", name="NVIDIA L4")
    monkeypatch.setattr("cs336_systems.commands.flags.visible_gpus", lambda: (gpu, other))
    monkeypatch.setattr("cs336_systems.commands.benchmark.resolve_device", lambda asked: Device.CUDA)
    words = ["--parallel", "ddp", "--ranks", "2", "--output", str(tmp_path)]
    assert benchmark(words) == 2
    assert "--ranks 2 needs as many GPUs of one kind" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_a_sweep_shares_one_batch_among_few_and_many_ranks():
    shape = ["--sizes", "tiny", "--parallel", "ddp-flat", "--ranks", "1", "2", "4"]
    words = [*FLAGS[: FLAGS.index("--vocab-size")], *shape]
    sweep = parse(SweepArguments, "sweep", [*words, "--context-lengths", "8", "--global-batch-size", "8"])
    assert [(config.ranks, config.batch_size) for config in sweep.plan().configs] == [(1, 8), (2, 4), (4, 2)]
    assert "global-batch-size-8" in default_name(sweep)
