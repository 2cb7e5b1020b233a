"""A run under nsys, played by tests/fake_nsys.py: what is kept when nsys does its work, and when
it does not.
"""

import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cs336.analysis.kernels.phases import LaunchPhase
from cs336.analysis.kernels.step_profile import decode_profile
from cs336.config import SIZES, Device, Parallel, Profiler, RunConfig
from cs336.record import RunRecord, Status, load_records
from cs336.sweep.keep import explain_run
from cs336.sweep.run import run_sweep
from cs336.sweep.store import explanation_path, raw_profile_path
from cs336.sweep.worker import run_here
from tests.faults.harness import Witness

ROOT = Path(__file__).parents[2]
PLAIN = RunConfig(
    size="tiny", model=replace(SIZES["tiny"], context_length=16), warmup_steps=1, measured_steps=2
)
UNDER_NSYS = replace(PLAIN, device=Device.CUDA, profiler=Profiler.NSYS)


@pytest.fixture(scope="module")
def nsys(no_waiting: Path) -> Iterator[Path]:
    """A machine with an nsys: the file that says how it will end."""
    fate, script, fake = no_waiting / "fate", no_waiting / "nsys", ROOT / "tests" / "fake_nsys.py"
    read, path, *words = (shlex.quote(str(word)) for word in (fate, ROOT, sys.executable, fake))
    script.write_text(
        f'#!/bin/sh\nFAKE_NSYS=$(cat {read}) PYTHONPATH={path} exec {" ".join(words)} "$@"\n'
    )
    script.chmod(0o755)
    yield fate
    script.unlink()


@pytest.fixture
def fate(nsys: Path) -> Path:
    nsys.write_text("")
    return nsys


def record_of(directory: Path, config: RunConfig = UNDER_NSYS) -> RunRecord:
    records, problems = load_records(directory / "runs")
    assert not problems
    return next(record for record in records if record.config == config)


def test_a_run_under_nsys_leaves_its_record_its_report_and_the_explanation(
    fate: Path, tmp_path: Path
) -> None:
    run_sweep([UNDER_NSYS], tmp_path / "out", Witness(), timeout_s=60)
    assert record_of(tmp_path / "out").status is Status.OK
    runs = tmp_path / "out" / "runs"
    assert raw_profile_path(UNDER_NSYS, runs).is_file()
    profile = decode_profile(explanation_path(UNDER_NSYS, runs).read_bytes())
    launches = {phase.phase: phase.launches for phase in profile.phases if sum(phase.launches)}
    assert launches == {
        LaunchPhase.FORWARD: (2,),
        LaunchPhase.BACKWARD: (3,),
        LaunchPhase.OPTIMIZER: (1,),
    }


def test_without_a_profile_the_time_of_the_plain_run_is_kept_and_the_next_try_is_made(
    fate: Path, tmp_path: Path
) -> None:
    out, before = tmp_path / "out", None
    for end, said in (("no record", "status 3"), ("no report", "left no")):
        fate.write_text(end)
        run_sweep([PLAIN, UNDER_NSYS], out, Witness(), timeout_s=60, allow_mixed=True)
        failed = record_of(out)
        assert failed.status is Status.CRASHED
        assert failed.failure
        assert said in failed.failure.message
        assert record_of(out, PLAIN).status is Status.OK
        plain = (out / "runs" / f"{PLAIN.key}.json").read_bytes()
        assert before in (None, plain)
        before = plain
    fate.write_text("")
    witness = Witness()
    run_sweep([PLAIN, UNDER_NSYS], out, witness, timeout_s=60, allow_mixed=True)
    assert witness.todo == [UNDER_NSYS]
    assert record_of(out).status is Status.OK
    assert (out / "runs" / f"{PLAIN.key}.json").read_bytes() == before


def test_ranks_under_nsys_are_in_one_report_and_explained_apart(fate: Path, tmp_path: Path) -> None:
    config = replace(UNDER_NSYS, parallel=Parallel.DDP_OVERLAP, ranks=2)
    runs = tmp_path / "runs"
    assert run_here(config, runs, ["GPU-0", "GPU-1"]).status is Status.OK
    explain_run(config, runs)
    profile = decode_profile(explanation_path(config, runs).read_bytes())
    assert [own.rank for own in profile.ranks] == [0, 1]
    for own in profile.ranks:
        launches = {phase.phase: phase.launches for phase in own.phases if sum(phase.launches)}
        assert launches == {
            LaunchPhase.FORWARD: (2,),
            LaunchPhase.BACKWARD: (4,),
            LaunchPhase.OPTIMIZER: (1,),
        }
        assert sum(sum(row.launches) for row in own.communication if row.collective is None) == 1
    assert not profile.notes
