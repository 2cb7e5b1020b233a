"""Directories of traces: which files are the ranks of one run, whatever their names."""

from pathlib import Path

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
