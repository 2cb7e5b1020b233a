"""On two GPUs, over NCCL: each way is training in one process; what is left of ranks that fail."""

import contextlib
from dataclasses import replace
from pathlib import Path

import pynvml
import pytest
import torch

from cs336.config import Device, Parallel
from cs336.measure.nvml import visible_gpus
from cs336.model.fast.packages import FLASH_4, is_installed
from cs336.record import Status
from cs336.sweep.keep import Listener
from cs336.sweep.run import run_sweep
from tests.faults.harness import eventually, processes_in
from tests.model.fast.steps import roundings
from tests.parallel import fast
from tests.parallel.checks import WAYS
from tests.parallel.conftest import ranks_of
from tests.parallel.test_runs import FAULTS, SHARED
from tests.parallel.test_ways import DDP_WAYS, check_trained_as_alone, distance
from tests.rounding import of_walk

pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.timeout(280)]
ON_GPUS = replace(SHARED, device=Device.CUDA)
"""The first is enough to come to the hang, unless the machine is busy."""
LEFT_BYTES = 64 * 2**20
"""Far less than a context takes."""


@pytest.fixture(scope="module", autouse=True)
def two_gpus():
    gpus = visible_gpus()
    if len(gpus) < 2:
        pytest.skip("needs two GPUs")
    return [gpu.uuid for gpu in gpus[:2]]


@pytest.fixture(scope="module")
def two(two_gpus):
    with ranks_of(2, two_gpus) as ranks:
        yield ranks


@pytest.mark.parametrize("kind", ["cs336", "gpt2"])
def test_steps_on_two_gpus_are_those_with_the_whole_batch(two, kind):
    for way in WAYS:
        for shard in (False, True) if way in DDP_WAYS else (False,):
            check_trained_as_alone(two, way, kind, "adamw", shard=shard)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"accumulate_steps": 2},
        pytest.param(
            {"packed_attention": True},
            marks=pytest.mark.skipif(not is_installed(FLASH_4), reason="needs FlashAttention 4"),
        ),
    ],
    ids=["plain", "micro-batches", "packed attention"],
)
@pytest.mark.parametrize("arch", ["cs336", "gpt2"])
def test_steps_in_graphs_are_those_of_data_parallelism(two, arch, changes):
    """In low precision, whose rounding AdamW makes much of; a copy that came too late would
    leave other weights.
    """
    wanted = two.call("tests.parallel.fast:train", "ddp-flat", arch, False, "cuda", changes)
    for way, shard in (
        ("fsdp", False),
        ("fsdp-push", False),
        ("ddp-push", False),
        ("ddp-push", True),
    ):
        if "accumulate_steps" in changes and not Parallel(way).adds_micro_batches:
            continue
        results = two.call("tests.parallel.fast:train", way, arch, shard, "cuda", changes)
        for (expected, _, losses, *_), (result, _, own_losses, *_) in zip(
            wanted, results, strict=True
        ):
            allowed = of_walk(torch.bfloat16, 2 * roundings(fast.config_of(arch).model))
            assert own_losses == pytest.approx(losses, rel=allowed)
            assert distance(result, expected) < allowed


def used_bytes(uuids):
    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
    return [pynvml.nvmlDeviceGetMemoryInfo(handle).used for handle in handles]


@contextlib.contextmanager
def nothing_is_left(directory, uuids):
    """In the end no process works in the directory any more, and the GPUs have their memory
    back.
    """
    (directory / "parallel_models.py").symlink_to(Path(__file__).with_name("models.py"))
    before = used_bytes(uuids)
    with contextlib.chdir(directory):
        yield
    assert not processes_in(directory)
    assert eventually(
        lambda: all(
            now < then + LEFT_BYTES for now, then in zip(used_bytes(uuids), before, strict=True)
        ),
        10,
    )


def test_ranks_that_fail_end_the_others_and_leave_nothing(tmp_path, two_gpus):
    faults = {
        name: replace(ON_GPUS, parallel=Parallel.FSDP, model_factory=f"parallel_models:{name}")
        for name in ("killed", "out_of_memory")
    }
    after = replace(ON_GPUS, seed=1)
    with nothing_is_left(tmp_path, two_gpus):
        outcome = run_sweep([*faults.values(), after], tmp_path, Listener(), timeout_s=100)
    by_config = {record.config: record for record in outcome.records}
    for name, config in faults.items():
        record, (status, words) = by_config[config], FAULTS[name]
        assert record.status is status, record.failure
        assert record.failed_rank == 1
        assert words in record.failure.message
        assert name == "killed" or record.failure.where == "forward of measured step 0"
    assert by_config[faults["out_of_memory"]].failure.requested_bytes == 2**50
    assert by_config[after].status is Status.OK


def test_ranks_of_which_one_hangs_end_at_the_time_limit(tmp_path, two_gpus):
    hangs = replace(ON_GPUS, model_factory="parallel_models:hangs")
    with nothing_is_left(tmp_path, two_gpus):
        (record,) = run_sweep([hangs], tmp_path, Listener(), timeout_s=12.0).records
    assert record.status is Status.TIMEOUT
