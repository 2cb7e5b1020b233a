"""The flags of runs on several ranks: what excludes what, and what a benchmark and a sweep make of them."""

from dataclasses import replace

import pytest

from cs336_systems.cli import benchmark
from cs336_systems.config import Device
from cs336_systems.measure.nvml import Gpu
from cs336_systems.record import read_record

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


def test_the_command_starts_its_ranks_itself(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert benchmark([*FLAGS, *SHAPE, "--parallel", "fsdp", "--ranks", "2"]) == 0
    (path,) = tmp_path.rglob("runs/*.json")
    record = read_record(path)
    assert record.config.ranks == len(record.ranks) == 2
