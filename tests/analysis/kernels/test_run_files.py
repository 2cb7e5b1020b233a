"""Directories of traces: which files are the ranks of one run, whatever their names."""

from pathlib import Path
from random import Random

import pytest

from cs336.analysis.columns import ProfileError
from cs336.analysis.kernels.explain import explain
from cs336.analysis.kernels.run_files import files_of_run

from .kineto_files import complete, write_trace

MILLISECOND = 1_000_000
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def write_rank(path: Path, rank: int | None, starts_ms: int = 1, world_size: int = 2) -> Path:
    """A trace with one all-reduce, which ends after 10 ms."""
    path.parent.mkdir(parents=True, exist_ok=True)
    call = complete("cuda_runtime", "cudaLaunchKernel", 100, 1, 0, 1000, correlation=1)
    start, duration = starts_ms * MILLISECOND, (10 - starts_ms) * MILLISECOND
    args = {"device": 0, "stream": 7, "correlation": 1}
    kernel = complete("kernel", ALL_REDUCE, 0, 7, start, duration, **args)
    top: dict[str, object] = {}
    if rank is not None:
        top["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": world_size}
    return write_trace(path, [call, kernel], **top)


@pytest.mark.parametrize(
    "names",
    [
        ("iteration_10/rank0_trace.json", "iteration_10/rank1_trace.json"),  # torchtitan
        ("host_17.1700000000.pt.trace.json", "host_18.1700000001.pt.trace.json"),  # TensorBoard
        ("0/trace.json", "1/trace.json"),
        ("b.json", "a.json"),
    ],
)
def test_ranks_of_one_run_are_known_by_what_files_hold(
    tmp_path: Path, names: tuple[str, str]
) -> None:
    paths = [write_rank(tmp_path / name, rank, 1 + 4 * rank) for rank, name in enumerate(names)]
    (tmp_path / "notes.json").write_text('{"of": "something else"}')
    assert files_of_run(tmp_path) == dict(enumerate(paths))
    waited = [times.waited_s for times in explain(tmp_path).ranks]
    assert waited == [(pytest.approx(0.004),), (0.0,)]  # rank 1 starts 4 ms later


def test_ranks_are_known_by_names_where_files_do_not_hold_them(tmp_path: Path) -> None:
    paths = [write_rank(tmp_path / f"rank-{rank}.json", None) for rank in range(3)]
    assert files_of_run(tmp_path) == dict(enumerate(paths))


def test_a_directory_of_one_trace_is_that_trace(tmp_path: Path) -> None:
    path = write_rank(tmp_path / "trace.json", None)
    assert files_of_run(tmp_path) == {None: path}
    assert explain(tmp_path).kernels == explain(path).kernels


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ({"i10/a.json": 0, "i10/b.json": 1, "i20/a.json": 0, "i20/b.json": 1}, 2),
        ({"a.json": 0, "b.json": 0}, 2),
        ({"a.json": None, "b.json": None, "c.json": None}, 3),
    ],
)
def test_several_runs_are_named_and_not_mixed(
    tmp_path: Path, files: dict[str, int | None], count: int
) -> None:
    for name, rank in files.items():
        write_rank(tmp_path / name, rank)
    with pytest.raises(ProfileError) as error:
        files_of_run(tmp_path)
    assert f"got {count} " in str(error.value)
    assert str(Path(next(iter(files)))) in str(error.value)


def test_a_directory_without_traces_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.json").write_text("{}")
    with pytest.raises(ProfileError):
        files_of_run(tmp_path)


@pytest.mark.parametrize(("present", "of"), [(1, 4), (2, 4), (2, 2)])
def test_missing_ranks_are_counted(tmp_path: Path, present: int, of: int) -> None:
    for rank in range(present):
        write_rank(tmp_path / f"{rank}.json", rank, world_size=of)
    notes = " ".join(explain(tmp_path).notes)
    assert (f"{present} of {of} ranks" in notes) == (present < of)


@pytest.mark.parametrize("seed", range(6))
def test_waits_are_of_the_same_collective_of_the_same_group(tmp_path: Path, seed: int) -> None:
    """Pairs and all ranks meet at random times, in another order on each rank, by clocks that
    differ. The truth is the time from a rank's arrival to that of the last.
    """
    random = Random(seed)
    num_ranks = random.choice((4, 6, 8))
    everyone = [*range(num_ranks)]
    groups = [everyone, *([rank, rank + 1] for rank in everyone[::2])]
    waits_ms = [0] * num_ranks
    durations: list[list[tuple[str, str, int]]] = [[] for _ in everyone]
    for ranks in groups:
        name = "world" if ranks is everyone else "pairs"
        for _ in range(random.randint(1, 4)):
            late_ms = [random.randint(0, 9) for _ in ranks]
            for rank, late in zip(ranks, late_ms, strict=True):
                waits_ms[rank] += max(late_ms) - late
                durations[rank].append((name, str(ranks), 1 + max(late_ms) - late))
    for rank, of_rank in enumerate(durations):
        # collectives of one group stay in order, those of others may go before or after
        if random.random() < 0.5:
            of_rank.sort(key=lambda collective: collective[0])
        write_collectives(tmp_path / f"{random.random()}.json", rank, num_ranks, of_rank)
    waited_s = [times.waited_s for times in explain(tmp_path).ranks]
    assert waited_s == [(pytest.approx(wait / 1e3),) for wait in waits_ms]


def write_collectives(
    path: Path, rank: int, world_size: int, durations: list[tuple[str, str, int]]
) -> None:
    """A trace of a rank that runs these collectives one after the other."""
    events = []
    clock = rank * 1_000_000_000
    for number, (name, ranks, milliseconds) in enumerate(durations, start=1):
        group = {"Process Group Name": name, "Process Group Ranks": ranks}
        ids = {"External id": number}
        comms = complete("cpu_op", "record_param_comms", 100, 1, clock, 2000, **group, **ids)
        call_ids = {"correlation": number, **ids}
        call = complete("cuda_runtime", "cudaLaunchKernel", 100, 1, clock + 1, 1000, **call_ids)
        duration = milliseconds * MILLISECOND
        of_kernel = {"device": 0, "stream": 7, **call_ids}
        kernel = complete("kernel", ALL_REDUCE, 0, 7, clock + 3000, duration, **of_kernel)
        events += [comms, call, kernel]
        clock += duration + 10_000
    first = rank * 1_000_000_000
    events.append(complete("user_annotation", "ProfilerStep#1", 100, 1, first, clock - first))
    info = {"backend": "nccl", "rank": rank, "world_size": world_size}
    write_trace(path, events, distributedInfo=info)
