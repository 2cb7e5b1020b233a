"""Process groups: bytes, bandwidth and exposed time that follow by arithmetic, of four ranks, and
what one rank alone cannot tell.
"""

import gzip
import json
from pathlib import Path
from random import Random
from statistics import median

import pytest

from cs336.analysis.kernels.explain import explain
from cs336.analysis.kernels.step_profile import GroupTimes, StepProfile
from cs336.costs.communication import Collective, bus_share
from tests.analysis.kernels.kineto_files import Event, complete, write_trace

TWO_GPUS = [*Path(__file__).with_name("two_gpus").glob("*.json.gz")]
MICROSECOND = 1000
NCCL = "ncclDevKernel_{}_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
WORLD = {"name": "0", "description": "default_pg", "ranks": (0, 1, 2, 3)}
HALVES = tuple({"name": "1", "description": "mesh_tp", "ranks": pair} for pair in ((0, 1), (2, 3)))
ALL_REDUCE = ("AllReduce_Sum", "allreduce")
ALL_GATHER = ("AllGather", "_allgather_base")
REDUCE_SCATTER = ("ReduceScatter_Sum", "_reduce_scatter_base")


class Rank:
    """The events of one rank, whose clock may differ from those of others."""

    def __init__(self, rank: int, *, clock_ns: int = 0, is_on_kernel: bool = False) -> None:
        self.rank, self.clock_ns, self.is_on_kernel = rank, clock_ns, is_on_kernel
        self.events: list[Event] = []
        self.number = 0

    def collective(
        self,
        kind: tuple[str, str],
        group: dict,
        elements: tuple[int, int],
        start_us: int,
        end_us: int,
        kernels: int = 1,
    ) -> None:
        """A collective of bf16; one operator may launch several kernels, one after the other."""
        self.number += 1
        message = {
            "Collective name": kind[1],
            "In msg nelems": elements[0],
            "Out msg nelems": elements[1],
            "Group size": len(group["ranks"]),
            "dtype": "BFloat16",
            "Process Group Name": group["name"],
            "Process Group Description": group["description"],
            "Process Group Ranks": str([*group["ranks"]]),
        }
        operator = {"External id": self.number}
        self._add("cpu_op", "record_param_comms", 1, start_us - 9, 5, **message, **operator)
        for part in range(kernels):
            length = (end_us - start_us) // kernels
            more = message if self.is_on_kernel else {}
            self._launch(NCCL.format(kind[0]), 20, start_us + part * length, length, **more)

    def compute(self, start_us: int, end_us: int) -> None:
        self.number += 1
        self._launch("sm90_xmma_gemm_bf16", 7, start_us, end_us - start_us)

    def _launch(
        self, name: str, stream: int, start_us: int, length_us: int, **more: object
    ) -> None:
        ids = {"correlation": len(self.events) + 1, "External id": self.number}
        self._add("cuda_runtime", "cudaLaunchKernel", 1, start_us - 8, 1, **ids)
        place = {"device": 0, "stream": stream}
        self._add("kernel", name, stream, start_us, length_us, **place, **ids, **more)

    def _add(
        self, category: str, name: str, thread: int, start_us: int, length_us: int, **args: object
    ) -> None:
        process = 0 if category == "kernel" else 100 + self.rank
        start_ns = self.clock_ns + start_us * MICROSECOND
        length_ns = length_us * MICROSECOND
        self.events.append(complete(category, name, process, thread, start_ns, length_ns, **args))

    def write(self, directory: Path, world_size: int | None = 4) -> Path:
        info = {"backend": "nccl", "rank": self.rank, "world_size": world_size}
        top = {} if world_size is None else {"distributedInfo": info}
        return write_trace(directory / f"rank{self.rank}.json", self.events, **top)


def four_ranks(directory: Path, *, is_on_kernel: bool = False, count: int = 4) -> StepProfile:
    """Rank r joins an all-reduce of 64 MiB at (r + 1) ms and all leave it at 5 ms. Then the second
    of each pair joins an all-gather of 16 MiB 300 us late, which takes 200 us from then on; a
    kernel runs beside the last 500 us of the all-reduce on rank 0.
    """
    for number in range(count):
        rank = Rank(number, clock_ns=number * 10**10, is_on_kernel=is_on_kernel)
        rank.collective(ALL_REDUCE, WORLD, (2**25, 2**25), 1000 * (number + 1), 5000)
        if number == 0:
            rank.compute(4500, 5000)
        gather_us = 6000 + 300 * (number % 2)
        rank.collective(ALL_GATHER, HALVES[number // 2], (2**22, 2**23), gather_us, 6500)
        rank.write(directory)
    return explain(directory)


def group_of(profile: StepProfile, ranks: str) -> GroupTimes:
    (group,) = [group for group in profile.groups if group.ranks == ranks]
    return group


@pytest.mark.parametrize("is_on_kernel", [False, True])
def test_bandwidth_of_four_ranks_follows_from_bytes_and_the_last_start(
    tmp_path: Path, is_on_kernel: bool
) -> None:
    profile = four_ranks(tmp_path, is_on_kernel=is_on_kernel)
    world = group_of(profile, "[0, 1, 2, 3]")
    assert (world.group, world.size, world.here, world.is_met) == ("default_pg", 4, 4, True)
    assert (world.count, world.bytes) == (4, 4 * 2**26)
    # 4 + 3 + 2 + 1 ms, of which 0.5 are hidden; from the last start on it takes 1 ms on each
    assert world.total_s == pytest.approx(0.010)
    assert world.exposed_s == pytest.approx(0.0095)
    assert world.sent_s == pytest.approx(0.004)
    assert world.bytes_per_s == pytest.approx(2**26 / 1e-3)
    assert world.bus_bytes_per_s == pytest.approx(1.5 * 2**26 / 1e-3)
    for pair in ("[0, 1]", "[2, 3]"):
        half = group_of(profile, pair)
        assert (half.group, half.size, half.collective) == ("mesh_tp", 2, Collective.ALL_GATHER)
        assert half.bytes == 2 * 2**24
        assert half.total_s == pytest.approx(700e-6)
        assert half.bus_bytes_per_s == pytest.approx(0.5 * 2**24 / 200e-6)
    (skew,) = profile.skew
    assert skew.collectives == 3
    assert (skew.median_s, skew.largest_s) == pytest.approx((300e-6, 3e-3))
    assert [times.last for times in profile.ranks] == [(0,), (1,), (0,), (2,)]
    waited = [times.waited_s for times in profile.ranks]
    assert waited == [(pytest.approx(time),) for time in (3.3e-3, 2e-3, 1.3e-3, 0)]


@pytest.mark.parametrize("count", [1, 3])
def test_without_all_ranks_bandwidth_is_a_lower_bound(tmp_path: Path, count: int) -> None:
    """Of three ranks, the first pair is complete, and nothing is said of the other groups."""
    profile = four_ranks(tmp_path, count=count)
    world = group_of(profile, "[0, 1, 2, 3]")
    assert (world.is_met, world.here, world.size) == (False, count, 4)
    assert world.sent_s == world.total_s
    assert world.bus_bytes_per_s is not None
    assert world.bus_bytes_per_s < 1.5 * 2**26 / 1e-3
    assert group_of(profile, "[0, 1]").is_met == (count == 3)
    assert [times.waited_s for times in profile.ranks] == [None] * (count if count > 1 else 0)
    assert len(profile.skew) == (count == 3)
    assert any(f"{count} of 4 ranks" in note for note in profile.notes)


def test_a_file_that_names_no_world_is_known_by_its_groups_to_be_one_of_several(
    tmp_path: Path,
) -> None:
    rank = Rank(0)
    rank.collective(ALL_REDUCE, WORLD, (2**20, 2**20), 100, 200)
    profile = explain(rank.write(tmp_path, world_size=None))
    assert any("1 of 4 ranks" in note for note in profile.notes)
    assert not profile.groups[0].is_met


def test_kernels_of_one_operator_share_its_bytes(tmp_path: Path) -> None:
    rank = Rank(0)
    rank.collective(REDUCE_SCATTER, WORLD, (2**22, 2**20), 100, 400, kernels=3)
    (group,) = explain(rank.write(tmp_path)).groups
    assert (group.count, group.bytes) == (3, 2**23)
    assert group.bus_bytes_per_s == pytest.approx(0.75 * 2**23 / 300e-6)


@pytest.mark.parametrize("seed", range(4))
def test_ranks_that_ran_different_collectives_are_not_compared(tmp_path: Path, seed: int) -> None:
    """A rank lacks one at an edge of its file, so that the others' would be taken for its next."""
    random = Random(seed)
    lacking, place = random.randrange(4), random.choice((0, 4))
    for number in range(4):
        rank = Rank(number)
        for index in range(5):
            if (number, index) != (lacking, place):
                start = 1000 * index + random.randint(10, 300)
                rank.collective(ALL_REDUCE, WORLD, (64, 64), start, 1000 * index + 500)
        rank.write(tmp_path)
    profile = explain(tmp_path)
    assert [times.waited_s for times in profile.ranks] == [None] * 4
    assert (profile.skew, group_of(profile, "[0, 1, 2, 3]").is_met) == ((), False)


def test_collectives_of_other_sizes_are_not_the_same_one(tmp_path: Path) -> None:
    """One rank's file begins one collective later and ends one later, without steps."""
    for number in range(4):
        rank = Rank(number, clock_ns=number * 10**9)
        for index in range(number == 2, 5 + (number == 2)):
            size = 2 ** (10 + index)
            rank.collective(ALL_REDUCE, WORLD, (size, size), 1000 * index + 10, 1000 * index + 500)
        rank.write(tmp_path)
    assert not group_of(explain(tmp_path), "[0, 1, 2, 3]").is_met


def test_sizes_that_are_no_sizes_are_not_read(tmp_path: Path) -> None:
    for number in range(4):
        rank = Rank(number)
        odd = [(-5, "many"), (2**60, None), (None, [3]), (True, {})][number]
        rank.collective(ALL_REDUCE, WORLD, odd, 100 * number + 10, 500)  # type: ignore[arg-type]
        rank.write(tmp_path)
    group = group_of(explain(tmp_path), "[0, 1, 2, 3]")
    assert (group.bytes, group.bus_bytes_per_s, group.is_met) == (None, None, True)


def test_shares_of_the_bus_are_those_of_nccl_tests() -> None:
    """By its PERFORMANCE.md, for 8 ranks."""
    shares = {
        Collective.ALL_REDUCE: 14 / 8,
        Collective.ALL_GATHER: 7 / 8,
        Collective.REDUCE_SCATTER: 7 / 8,
        Collective.ALL_TO_ALL: 7 / 8,
        Collective.BROADCAST: 1,
        Collective.REDUCE: 1,
        Collective.POINT_TO_POINT: 1,
        Collective.OTHER: None,
    }
    assert {kind: bus_share(kind, 8) for kind in shares} == shares


def test_skew_of_two_h200_by_their_clocks() -> None:
    """The clocks are shifted so that collectives end together, as they do within 25 us in each
    step; then the starts are compared, which the program under test never does.
    """
    files = [json.loads(gzip.decompress(path.read_bytes())) for path in sorted(TWO_GPUS)]
    by_rank = [sorted(map(times_us, filter(is_nccl, file["traceEvents"]))) for file in files]
    skew_s, last = [], []
    for step in range(2):  # of 18 collectives
        pairs = list(zip(*(ends[18 * step :][:18] for ends in by_rank), strict=True))
        shifts = [one[1] - other[1] for one, other in pairs]
        shift = median(shifts)
        assert max(abs(of_one - shift) for of_one in shifts) < 25
        later = [one[0] - other[0] - shift for one, other in pairs]
        skew_s.append(max(map(abs, later)) / 1e6)
        last.append(sum(time > 0 for time in later))
    profile = explain(TWO_GPUS[0].parent)
    largest = [skew.largest_s for skew in profile.skew]
    assert largest == pytest.approx(skew_s, abs=25e-6)
    files_rank = [file["distributedInfo"]["rank"] for file in files]
    (times,) = [times for times in profile.ranks if times.rank == files_rank[0]]
    assert times.last == tuple(last)


def is_nccl(event: dict) -> bool:
    return event["cat"] == "kernel" and event["name"].startswith("nccl")


def times_us(event: dict) -> tuple[float, float]:
    return event["ts"], event["ts"] + event["dur"]


def test_bus_bandwidth_of_two_h200_is_that_which_their_program_timed() -> None:
    """two_gpus_sizes/ has four steps of DistributedDataParallel on two H200. After them the
    program timed twenty all-reduces of as many bytes by CUDA events: 311.4 and 311.8 GB/s.

    In the step the last rank to join waits for nobody: its kernel lasts as long as sending.
    """
    profile = explain(Path(__file__).with_name("two_gpus_sizes"))
    (group,) = profile.groups
    num_bytes = 4 * 8 * (4096 * 4096 + 4096)
    assert (group.size, group.here, group.is_met) == (2, 2, True)
    assert group.bytes == group.count * num_bytes
    last_ns = [1_712_881, 1_727_761, 1_705_393, 1_706_065]
    assert group.bus_bytes_per_s == pytest.approx(4 * num_bytes / (sum(last_ns) / 1e9), rel=1e-3)
    assert group.bus_bytes_per_s == pytest.approx(311.6e9, rel=0.01), "timed by its program"
