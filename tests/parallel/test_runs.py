"""Runs on several ranks, from the configuration to the record and the table, good ones and those
that fail.
"""

import contextlib
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cs336.config import (
    Arch,
    ModelConfig,
    OptimizerKind,
    Parallel,
    Phase,
    Precision,
    Profiler,
    RunConfig,
)
from cs336.record import Status, WarningCode, read_record
from cs336.sweep.keep import Listener
from cs336.sweep.run import run_sweep
from tests.faults.harness import eventually, processes_in, time_is_up
from tests.model.fast.steps import of_losses
from tests.parallel.models import SLEEP_S

pytestmark = pytest.mark.timeout(280)
SHAPE = ModelConfig(vocab_size=37, context_length=8, d_model=24, d_ff=40, num_layers=2, num_heads=2)
ALONE = RunConfig(size="custom", model=SHAPE, batch_size=4, warmup_steps=2, measured_steps=3)
SHARED = replace(ALONE, parallel=Parallel.DDP_NAIVE, ranks=2, batch_size=2)
IN_PARTS = replace(SHARED, batch_size=1, accumulate_steps=2)
RUNS = {
    "alone": ALONE,
    "micro-batches alone": replace(ALONE, batch_size=1, accumulate_steps=4),
    "micro-batches alone, fast in bf16": replace(
        ALONE,
        batch_size=1,
        accumulate_steps=4,
        precision=Precision.BF16,
        optimizer=OptimizerKind.FUSED,
        cast_once=True,
        fused_blocks=True,
        fused_loss=True,
    ),
    **{
        f"micro-batches {way}": replace(IN_PARTS, parallel=way)
        for way in Parallel
        if way is not Parallel.NONE and way.adds_micro_batches
    },
    **{
        str(way): replace(SHARED, parallel=way)
        for way in (Parallel.DDP_FLAT, Parallel.FSDP, Parallel.FSDP2)
    },
    "sharded optimizer": replace(SHARED, parallel=Parallel.DDP_OVERLAP, shard_optimizer=True),
    "checkpoints, bf16": replace(
        SHARED, parallel=Parallel.FSDP, checkpoint_blocks=1, precision=Precision.BF16
    ),
    "tied": replace(SHARED, parallel=Parallel.FSDP_PUSH, model=replace(SHAPE, arch=Arch.GPT2)),
}
FAULTS = {
    "killed": (Status.KILLED, "SIGKILL"),
    "stops": (Status.KILLED, "SIGSTOP"),
    "out_of_memory": (Status.OOM, "rank 1"),
}


def faulty(name):
    return replace(SHARED, model_factory=f"parallel_models:{name}", parallel=Parallel.DDP_OVERLAP)


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """The records of one sweep by name, and its directory."""
    directory = tmp_path_factory.mktemp("shared")
    with (
        contextlib.chdir(directory),
        time_is_up(lambda worker: worker.subject == faulty("hangs") and Path("hangs").exists()),
    ):
        (directory / "parallel_models.py").symlink_to(Path(__file__).with_name("models.py"))
        faults = {name: faulty(name) for name in (*FAULTS, "hangs")}
        slow = replace(SHARED, model_factory="parallel_models:slow")
        profiled = replace(SHARED, profiler=Profiler.KINETO)
        # the last two after those that fail
        runs = {**RUNS, **faults, "slow": slow, "profiled": profiled}
        outcome = run_sweep([*runs.values()], directory, Listener(), timeout_s=100)
        assert outcome.unexplained == ()
        assert eventually(lambda: not processes_in(directory))
    by_config = {record.config: record for record in outcome.records}
    return {name: by_config[config] for name, config in runs.items()}, directory


@pytest.mark.parametrize("name", [name for name in RUNS if name != "alone"])
def test_losses_are_those_of_one_process_with_the_whole_batch(swept, name):
    records, _ = swept
    assert records[name].status is Status.OK, records[name].failure
    if name != "tied":  # another model
        expected = records["alone"].losses
        dtype = torch.bfloat16 if "bf16" in name else torch.float32
        assert records[name].losses == pytest.approx(expected, abs=of_losses(ALONE, dtype))


@pytest.mark.parametrize("name", [name for name in RUNS if "alone" not in name])
def test_each_step_is_the_slowest_ranks(swept, name):
    record = swept[0][name]
    assert [rank.rank for rank in record.ranks] == [*range(record.config.ranks)]
    steps = [times_by_phase(rank) for rank in record.ranks]
    whole = times_by_phase(record)
    assert [*whole] == [
        Phase.FORWARD,
        Phase.BACKWARD,
        Phase.COMMUNICATION,
        Phase.OPTIMIZER,
        Phase.STEP,
    ]
    for step, time_s in enumerate(whole[Phase.STEP]):
        slowest = max(steps, key=lambda times: times[Phase.STEP][step])
        assert {phase: times[step] for phase, times in whole.items()} == {
            phase: times[step] for phase, times in slowest.items()
        }
        assert sum(times[step] for times in whole.values()) - time_s <= time_s
    for index, loss in enumerate(record.losses):
        assert loss == pytest.approx(statistics.fmean(rank.losses[index] for rank in record.ranks))


def test_a_rank_that_sleeps_in_forward_is_found_and_the_other_waits_after_backward(swept):
    record = swept[0]["slow"]
    assert record.status is Status.OK, record.failure
    messages = {warning.code: warning.message for warning in record.warnings}
    assert messages[WarningCode.UNEVEN_RANKS].startswith("rank 1 works")
    quick, slow = map(times_by_phase, record.ranks)
    assert min(slow[Phase.FORWARD]) > SLEEP_S > min(quick[Phase.FORWARD])
    assert max(quick[Phase.COMMUNICATION]) > SLEEP_S / 2 > min(slow[Phase.COMMUNICATION])


def times_by_phase(measured):
    return {measurement.phase: measurement.times_s for measurement in measured.measurements}


@pytest.mark.parametrize("name", ["ddp-flat", "sharded optimizer", "fsdp", "fsdp2"])
def test_what_each_rank_keeps_at_the_three_moments(swept, name):
    """Of fp32: 4 bytes of a parameter and of its gradient, 8 of AdamW's state; of a sharded
    matrix half of them.
    """
    record = swept[0][name]
    whole = 4 * record.num_parameters
    vectors = 4 * (2 * SHAPE.num_layers + 1) * SHAPE.d_model
    # PyTorch divides by rows, so rank 0 has half a row more than half of both tables
    rows = 2 * SHAPE.d_model
    for rank, sign in zip(record.ranks, (1, -1), strict=True):
        kept = {"fsdp": (whole + vectors) // 2, "fsdp2": whole // 2 + sign * 2 * rows}.get(
            name, whole
        )
        keeps = [(moment.parameters_bytes, moment.gradients_bytes) for moment in rank.moments]
        assert keeps == [(kept, 0), (kept, kept), (kept, 0)]
        start, *later = [moment.optimizer_state_bytes for moment in rank.moments]
        assert start == 0
        if name != "sharded optimizer":
            assert later == [2 * kept, 2 * kept]
    states = [rank.moments[1].optimizer_state_bytes for rank in record.ranks]
    if name == "sharded optimizer":
        assert sum(states) == 2 * whole
        assert max(states) < 1.2 * whole


@pytest.mark.parametrize("name", FAULTS)
def test_a_rank_that_fails_ends_the_others_and_is_named(swept, name):
    records, directory = swept
    record = records[name]
    status, words = FAULTS[name]
    assert record.status is status, record.failure
    assert record.failed_rank == 1
    assert record.failure.message.startswith("rank 1")
    assert words in record.failure.message
    if name == "out_of_memory":
        assert record.failure.where == "forward of measured step 0"
    assert read_record(directory / "runs" / f"{record.key}.json") == record


def test_ranks_of_which_one_hangs_end_at_the_time_limit(swept):
    assert swept[0]["hangs"].status is Status.TIMEOUT


def test_each_rank_has_a_profile(swept):
    records, directory = swept
    record = records["profiled"]
    assert record.status is Status.OK
    names = sorted(path.name for path in (directory / "traces").iterdir())
    assert names == [f"{record.key}.json.gz", f"rank1_{record.key}.json.gz"]
