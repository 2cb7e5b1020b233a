"""Faults of and on a GPU: it runs out of memory, its context dies, somebody else computes on it."""

import subprocess
import sys

import pynvml
import pytest

from cs336.config import Device
from cs336.record import Status, WarningCode
from tests.faults.harness import Witness, config, contents, sweep

COMPUTE = """
import sys, torch
torch.zeros(1, device="cuda").item()
print("ready", flush=True)
sys.stdin.read()
"""


def on_gpu(fault="good", **changes):
    return config(fault, device=Device.CUDA, **changes)


def survive(place, fault):
    """The record of the fault, after a good run on the GPU and before another."""
    before, faulty, after = on_gpu(seed=1), on_gpu(fault), on_gpu(seed=2)
    sweep(place, before)
    earlier = contents(place / "runs")
    witness = Witness()
    outcome = sweep(place, before, faulty, after, witness=witness)
    assert witness.runs == [faulty, after]
    assert contents(place / "runs").items() >= earlier.items()
    by_config = {record.config: record for record in outcome.records}
    assert by_config[after].status is Status.OK
    return by_config[faulty]


@pytest.mark.gpu
def test_gpu_out_of_memory_says_what_was_asked_and_what_was_free(place):
    record = survive(place, "asks_for_more_than_the_gpu_has")
    assert record.status is Status.OOM
    assert record.failure.requested_bytes == 2**41
    assert 0 < record.failure.free_bytes < 2**41
    assert record.environment.device_uuid is not None


@pytest.mark.gpu
def test_a_device_side_assert_is_a_cuda_error_of_one_run(place):
    record = survive(place, "out_of_range")
    assert record.status is Status.CUDA_ERROR
    # of the assert, or of whichever call was the next to hear of it
    assert "CUDA error" in record.failure.message


@pytest.mark.gpu
def test_workers_have_not_touched_cuda_before_they_measure(place):
    runs = [on_gpu("notes_its_process", repeat=repeat) for repeat in range(2)]
    sweep(place, *runs)
    notes = [line.split() for line in (place / "notes").read_text().splitlines()]
    assert len({pid for pid, *_ in notes}) == len(runs)
    assert [initialized for *_, initialized, _ in notes] == ["0", "0"]


@pytest.mark.gpu
def test_company_on_the_gpu_is_a_warning(place):
    other = subprocess.Popen(
        [sys.executable, "-c", COMPUTE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout.readline() == "ready\n"
        pynvml.nvmlInit()
        if not pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(0)):
            pytest.skip("the driver shows no processes here")
        (record,) = sweep(place, on_gpu()).records
    finally:
        other.communicate()
    assert record.status is Status.OK
    assert WarningCode.GPU_SHARED in {warning.code for warning in record.warnings}
