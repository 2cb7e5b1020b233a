"""Ranks that torchrun started: what it sets in their environment, what it does when one dies, and the one record."""

import json
import multiprocessing
import os
import signal
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from cs336_systems.analysis.kernels.step_profile import decode_profile
from cs336_systems.cli import benchmark
from cs336_systems.commands.flags import parse
from cs336_systems.commands.sweep import SweepArguments, default_name
from cs336_systems.config import Device
from cs336_systems.measure.nvml import Gpu
from cs336_systems.parallel.rank import rank_from_environment
from cs336_systems.record import Status, load_records
from cs336_systems.sweep.isolation import fork_server, start
from cs336_systems.sweep.process import die_with_parent
from cs336_systems.sweep.store import kernel_profile_path
from tests.faults.harness import eventually, processes_in

pytestmark = pytest.mark.timeout(280)
FLAGS = [
    "--device", "cpu", "--warmup-steps", "2", "--measured-steps", "2", "--vocab-size", "37", "--context-length", "8",
    "--batch-size", "2",
]  # fmt: skip
SHAPE = ["--d-model", "24", "--d-ff", "40", "--num-layers", "1", "--num-heads", "2"]
PATIENCE_S = 200


@contextmanager
def torchrun(directory, words, count=2, starter=None):
    """The processes that torchrun would start, or one that starts them.

    As torchrun does, this process holds the store that they meet in.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port,
        "TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    processes = []
    try:
        for rank in range(1 if starter else count):
            environment = {name: str(value) for name, value in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()}
            process = fork_server().Process(target=starter or _rank, args=(environment, directory, words))
            start(process)
            processes.append(process)
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def _rank(environment, directory, words):
    die_with_parent()
    os.environ.update(environment)
    os.chdir(directory)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os._exit(benchmark([*FLAGS, *([] if "--model" in words else SHAPE), *words]))


def test_rank_0_writes_the_record_of_both_and_explains_their_traces(tmp_path):
    with torchrun(tmp_path, ["--parallel", "ddp-overlap", "--profile"]) as processes:
        for process in processes:
            process.join(PATIENCE_S)
            assert process.exitcode == 0
    single = tmp_path / "data/kineto_profiles/single"
    ((record,), _) = load_records(single / "runs")
    assert record.status is Status.OK
    assert [each.rank for each in record.ranks] == [0, 1]
    assert record.config.ranks == 2
    assert {path.name for path in single.iterdir()} == {"runs", "traces", "kernels"}
    profile = decode_profile(kernel_profile_path(record.config, single / "runs").read_bytes())
    assert [each.rank for each in profile.ranks] == [0, 1]


@pytest.mark.parametrize(("fault", "words"), [("raises", "two and two are five"), ("killed", "without a record")])
def test_of_a_rank_that_fails_rank_0_writes_the_record(tmp_path, fault, words):
    (tmp_path / "parallel_models.py").symlink_to(Path(__file__).with_name("models.py"))
    with torchrun(tmp_path, ["--parallel", "ddp-flat", "--model", f"parallel_models:{fault}"]) as processes:
        processes[1].join(PATIENCE_S)
        assert processes[1].exitcode == (-signal.SIGKILL if fault == "killed" else 0)
        os.kill(processes[0].pid, signal.SIGTERM)  # as torchrun does when another rank is gone
        processes[0].join(PATIENCE_S)
        assert processes[0].exitcode == 1
    runs = tmp_path / "data/e2e_benchmark/single/runs"
    assert eventually(lambda: [*runs.iterdir()])
    ((record,), _) = load_records(runs)
    assert record.status is Status.CRASHED
    assert record.failed_rank == 1
    assert words in record.failure.message


def _agent(environment, directory, words):
    """As torchrun: start both ranks and wait for them."""
    die_with_parent()
    for rank in range(2):
        own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        multiprocessing.get_context("fork").Process(target=_rank, args=(own, directory, words)).start()
    time.sleep(PATIENCE_S)


def test_ranks_end_soon_after_torchrun_was_killed(tmp_path):
    (tmp_path / "parallel_models.py").symlink_to(Path(__file__).with_name("models.py"))
    words = ["--parallel", "ddp-flat", "--model", "parallel_models:hangs"]
    with torchrun(tmp_path, words, starter=_agent) as (agent,):
        assert eventually((tmp_path / "hangs").exists)
        agent.kill()
        assert eventually(lambda: not processes_in(tmp_path))
    ((record,), _) = load_records(tmp_path / "data/e2e_benchmark/single/runs")
    assert record.status is Status.CRASHED
    assert "torchrun ended" in record.failure.message


def test_what_torchrun_sets_is_read_and_what_schedulers_set_is_not():
    shared = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "host", "MASTER_PORT": "1", "RANK": "1"}
    assert rank_from_environment({**shared, "WORLD_SIZE": "2"}) is None
    of_torchrun = {**shared, "TORCHELASTIC_RUN_ID": "none"}
    found = rank_from_environment({**of_torchrun, "WORLD_SIZE": "2"})
    assert (found.rank, found.ranks) == (1, 2)
    with pytest.raises(ValueError, match="one machine"):
        rank_from_environment({**of_torchrun, "WORLD_SIZE": "4"})
    with pytest.raises(ValueError, match="WORLD_SIZE"):
        rank_from_environment({**of_torchrun, "WORLD_SIZE": "two"})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--parallel ddp-overlap"),
        (["--parallel", "ddp", "--ranks", "3"], "--ranks 3"),
        (["--parallel", "ddp", "--memory"], "--memory"),
    ],
)
def test_flags_that_contradict_torchrun(monkeypatch, capsys, tmp_path, words, message):
    variables = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "h"}
    for name, value in {**variables, "MASTER_PORT": 1, "TORCHELASTIC_RUN_ID": "x"}.items():
        monkeypatch.setenv(name, str(value))
    assert benchmark([*FLAGS, *words, "--output", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "2"], "--parallel ddp-overlap"),
        (["--parallel", "ddp", "--ranks", "2", "--mode", "forward"], "--mode forward"),
        (["--parallel", "fsdp", "--ranks", "2", "--shard-optimizer"], "--parallel fsdp"),
        (["--parallel", "fsdp", "--ranks", "2", "--compile", "default"], "--compile"),
        (["--parallel", "ddp", "--ranks", "65"], "at most 64"),
        (["--parallel", "ddp", "--ranks", "3", "--global-batch-size", "8"], "multiple of the 3"),
    ],
)
def test_what_excludes_what(capsys, tmp_path, words, message):
    assert benchmark([*FLAGS, *words, "--output", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_more_ranks_than_gpus_are_refused_before_anything_starts(monkeypatch, capsys, tmp_path):
    gpu = Gpu(index=0, uuid="GPU-1", name="NVIDIA H200", memory_bytes=2**37, driver="580")
    other = replace(gpu, index=1, uuid="GPU-2", name="NVIDIA L4")
    monkeypatch.setattr("cs336_systems.commands.flags.visible_gpus", lambda: (gpu, other))
    monkeypatch.setattr("cs336_systems.commands.benchmark.resolve_device", lambda asked: Device.CUDA)
    words = ["--parallel", "ddp", "--ranks", "2", "--output", str(tmp_path)]
    assert benchmark(words) == 2
    assert "--ranks 2 needs as many GPUs of one kind" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_the_command_starts_its_ranks_itself(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert benchmark([*FLAGS, *SHAPE, "--parallel", "fsdp", "--ranks", "2", "--global-batch-size", "6", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["config"]["ranks"] == len(record["ranks"]) == 2
    assert record["config"]["batch_size"] == 3


def test_a_sweep_shares_one_batch_among_few_and_many_ranks():
    words = [
        *FLAGS[: FLAGS.index("--vocab-size")],
        "--sizes",
        "tiny",
        "--parallel",
        "ddp-flat",
        "--ranks",
        "1",
        "2",
        "4",
    ]
    sweep = parse(SweepArguments, "sweep", [*words, "--context-lengths", "8", "--global-batch-size", "8"])
    assert [(config.ranks, config.batch_size) for config in sweep.plan().configs] == [(1, 8), (2, 4), (4, 2)]
    assert "global-batch-size-8" in default_name(sweep)


@pytest.mark.parametrize(
    ("ways", "ranks", "expected"),
    [
        (["none", "ddp-flat"], ["1", "2", "3"], {("none", 1), ("ddp-flat", 1), ("ddp-flat", 2), ("ddp-flat", 3)}),
        (["none", "fsdp"], ["2"], {("none", 1), ("fsdp", 2)}),
        (["none"], ["2"], None),
    ],
)
def test_beside_ways_to_share_a_step_one_rank_is_measured_once(ways, ranks, expected):
    words = [*FLAGS[: FLAGS.index("--vocab-size")], "--parallel", *ways, "--ranks", *ranks]
    sweep = parse(SweepArguments, "sweep", [*words, "--sizes", "tiny", "--context-lengths", "8"])
    if expected is None:
        with pytest.raises(ValueError, match="--ranks needs a way"):
            sweep.plan()
    else:
        found = [(str(config.parallel), config.ranks) for config in sweep.plan().configs]
        assert len(found) == len(expected)
        assert set(found) == expected
