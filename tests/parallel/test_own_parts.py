"""A user's own way to share a step, and own optimizer, train as ours do, on two ranks; flags of
runs on ranks.
"""

from dataclasses import replace

import pytest
import torch

from cs336.cli import benchmark, main
from cs336.commands.configure import config_of
from cs336.config import SIZES, Device, OptimizerKind, Parallel, RunConfig
from cs336.measure.nvml import Gpu
from tests.model.fast.steps import OF_AN_UPDATE
from tests.rounding import of_chain

PARTS = "tests.parallel.own_parts"
MODEL = replace(SIZES["tiny"], vocab_size=50, context_length=8, d_model=16, d_ff=32, num_heads=2)
OURS = RunConfig(
    size="custom", model=MODEL, parallel=Parallel.DDP_FLAT, ranks=2, optimizer=OptimizerKind.FOREACH
)


@pytest.mark.parametrize(
    "parts",
    [
        {"own_ddp": f"{PARTS}:Bucketed", "bucket_mib": 3},
        {"own_optimizer": f"{PARTS}:Sharded"},
        {"own_ddp": f"{PARTS}:DDP", "own_optimizer": f"{PARTS}:Sharded"},
    ],
    ids=str,
)
def test_own_parts_train_as_ours_do(two, parts):
    """torch.optim.AdamW has the same weight decay as ours."""
    config = replace(
        OURS,
        parallel=Parallel.OWN if "own_ddp" in parts else OURS.parallel,
        optimizer=OptimizerKind.OWN if "own_optimizer" in parts else OURS.optimizer,
        **parts,
    )
    for (ours, _), (found, sizes) in zip(
        two.call(f"{PARTS}:losses", OURS), two.call(f"{PARTS}:losses", config), strict=True
    ):
        assert found == pytest.approx(ours, rel=of_chain(torch.float32, 2 * 3 * OF_AN_UPDATE))
        assert sizes[-1:] == [config.bucket_mib] or "Bucketed" not in str(parts)


def test_a_class_without_the_interface_is_refused(two):
    config = replace(OURS, parallel=Parallel.OWN, own_ddp=f"{PARTS}:WithoutInterface")
    with pytest.raises(AssertionError, match="needed a module with finish_gradient"):
        two.call(f"{PARTS}:losses", config)


def test_more_ranks_than_gpus_are_refused_before_anything_starts(monkeypatch, capsys, tmp_path):
    gpu = Gpu(index=0, uuid="GPU-1", name="NVIDIA H200", memory_bytes=2**37, driver="580")
    other = replace(gpu, index=1, uuid="GPU-2", name="NVIDIA L4")
    monkeypatch.setattr("cs336.commands.configure.visible_gpus", lambda: (gpu, other))
    monkeypatch.setattr("cs336.commands.benchmark.resolve_device", lambda asked: Device.CUDA)
    words = ["--parallel", "ddp", "--ranks", "2", "--output", str(tmp_path)]
    assert benchmark(words) == 2
    assert "--ranks 2 needs as many GPUs of one kind" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_a_sweep_has_own_parts_beside_ours(capsys):
    flags = (
        "--context-lengths 32 --parallel ddp-naive ddp-overlap --ranks 2 --bucket-mib 0 25 "
        "--device cpu"
    )
    words = ["sweep", "--sizes", "tiny", *flags.split(), "--own-ddp", f"{PARTS}:DDP", "--dry-run"]
    assert main(words) == 0
    runs = [line for line in capsys.readouterr().out.splitlines() if "5 + 10 steps" in line]
    assert sum("ddp-naive" in line for line in runs) == 1, "it has no buckets"
    assert sum("ddp-overlap" in line for line in runs) == 2
    assert sum(f"{PARTS}:DDP" in line for line in runs) == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"bucket_mib": 3, "parallel": Parallel.DDP_NAIVE, "ranks": 2},
            "--bucket-mib needs --parallel ddp-overlap",
        ),
        (
            {"own_ddp": f"{PARTS}:none_such", "ranks": 2},
            "--own-ddp tests.parallel.own_parts:none_such",
        ),
        ({"parallel": Parallel.OWN, "ranks": 2}, "needs --own-ddp"),
        (
            {"own_optimizer": f"{PARTS}:SGD", "optimizer": OptimizerKind.FUSED},
            "--own-optimizer needs --optimizer own",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(given, said):
    with pytest.raises(ValueError, match=said):
        config_of(Device.CPU, given, {"size": "tiny"}, fast=False)
