"""Collectives: exposed time counted by nanosecond, phases around them, ranks, and a real trace of
two GPUs.

two_gpus/ has two steps of `--parallel ddp-overlap --ranks 2` on two H200, of each rank, as
torch.profiler wrote them, without the operators of the host.
"""

import gzip
import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cs336.analysis.columns import ProfileError
from cs336.analysis.kernels.attribution import Attribution, attribute
from cs336.analysis.kernels.classes import KernelClass
from cs336.analysis.kernels.collectives import collective_of
from cs336.analysis.kernels.communication import by_rank, without_rank
from cs336.analysis.kernels.explain import explain, summarise
from cs336.analysis.kernels.process_groups import collectives_of, met, rank_times
from cs336.analysis.kernels.step_profile import (
    PhaseTimes,
    RankTimes,
    StepProfile,
    decode_profile,
    encode_profile,
)
from cs336.config import SIZES, Parallel, RunConfig
from cs336.costs.communication import Collective
from cs336.ranges import rank_range
from tests.analysis.kernels.kineto_files import complete, events_of, write_trace
from tests.analysis.kernels.tracing import (
    AUTOGRAD,
    MAIN,
    PROCESS,
    Call,
    Kernel,
    Recording,
    Span,
    each_ns,
    make_trace,
    profile,
    totals,
    training,
    write_export,
)

REAL = Path(__file__).with_name("two_gpus") / "ddp.json.gz"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ALL_GATHER = "ncclDevKernel_AllGather_RING_LL"
COMPUTE, COLLECTIVES = 7, 16
"""Streams."""


def exposed(
    explained: StepProfile, kind: Collective | None = None
) -> dict[str, tuple[list[int], list[int]]]:
    """By phase, the nanoseconds of collectives in each step, and those of them that are exposed."""
    rows = [row for row in explained.communication if row.collective is kind]
    return {row.phase.value: (each_ns(row.total_s), each_ns(row.exposed_s)) for row in rows}


def walls(explained: StepProfile) -> dict[str, list[int]]:
    return {times.phase.value: each_ns(times.wall_s) for times in explained.phases}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (ALL_REDUCE, Collective.ALL_REDUCE),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWork*)", Collective.ALL_REDUCE),
        (ALL_GATHER, Collective.ALL_GATHER),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", Collective.REDUCE_SCATTER),
        ("ncclDevKernel_Broadcast_RING_LL", Collective.BROADCAST),
        ("ncclDevKernel_Reduce_Sum_f32_RING_LL", Collective.REDUCE),
        ("ncclDevKernel_SendRecv", Collective.POINT_TO_POINT),
        ("ncclDevKernel_Generic_1", Collective.OTHER),
        ("void vllm::cross_device_reduce_1stage<float, 2>(vllm::RankData*)", Collective.ALL_REDUCE),
        ("void at::native::reduce_kernel<512, 1>(at::native::ReduceOp<float>)", None),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWork*)", Collective.POINT_TO_POINT),
        ("nccl:_all_gather_base", Collective.ALL_GATHER),
        ("nccl:_reduce_scatter_base", Collective.REDUCE_SCATTER),
        ("nccl:send 0->1", Collective.POINT_TO_POINT),
        ("nccl:all_to_all", Collective.ALL_TO_ALL),
        ("gloo:broadcast", Collective.BROADCAST),
        ("c10d::allreduce_", Collective.ALL_REDUCE),
        ("c10d::alltoall_base_", Collective.ALL_TO_ALL),
        ("c10d::recv_", Collective.POINT_TO_POINT),
        ("_c10d_functional::all_gather_into_tensor", Collective.ALL_GATHER),
        ("c10d::barrier", Collective.OTHER),
        ("void deep_ep::intranode::dispatch<8, 768, 8192>(int4*)", Collective.ALL_TO_ALL),
        ("void internode::combine<false, 8, __nv_bfloat16>(int4*)", Collective.ALL_TO_ALL),
        ("deep_ep::layout::get_dispatch_layout", Collective.OTHER),
        ("EpCombineIntraNodeKernel_bf16", Collective.ALL_TO_ALL),
        ("void pplx::all_to_all::dispatchKernel<2u>(int*)", Collective.ALL_TO_ALL),
        ("void multimem_all_reduce_kernel<c10::BFloat16, 16>(float*)", Collective.ALL_REDUCE),
        ("multimem_all_gather_kernel", Collective.ALL_GATHER),
        ("allreduce_fusion_kernel_oneshot_lamport", Collective.ALL_REDUCE),
        ("void tensorrt_llm::kernels::oneShotAllReduceKernel<__half>(P)", Collective.ALL_REDUCE),
        ("void barrier_on_stream_kernel_threadgroup<(threadgroup_t)2>(int)", Collective.OTHER),
        ("void dispatch_rays<4>(Params)", None),
        ("combine", None),
        ("memcpy Device-to-Device", None),
        ("memcpy Peer-to-Peer", Collective.COPY_TO_PEERS),  # nsys
        ("Memcpy PtoP (Device -> Device)", Collective.COPY_TO_PEERS),  # torch.profiler
    ],
)
def test_kinds_of_collectives(name: str, kind: Collective | None) -> None:
    assert collective_of(name) is kind


@pytest.mark.parametrize("seed", range(20))
def test_what_an_operator_of_a_collective_launched_is_communication(
    seed: int, tmp_path: Path
) -> None:
    """Whatever the kernel's name: the operator is found by its number, or named by the kernel."""
    generator = random.Random(seed)
    names = ("my_ring", "gemm", "void at::native::reduce_kernel<512>(int)", "ncclDevKernel_Generic")
    kinds = {"allreduce": "all-reduce", "_allgather_base": "all-gather", "barrier": "other"}
    events = [complete("user_annotation", "step", 7, 100, 0, 100_000)]
    expected_ns = dict.fromkeys((*kinds.values(), None), 0)
    for number in range(1, generator.randint(10, 40)):
        name, duration = generator.choice(names), generator.randint(1, 400)
        collective, is_named = generator.choice([*kinds, None]), generator.random() < 0.5
        said = {} if collective is None else {"Collective name": collective}
        operator = "aten::mm" if collective is None else "record_param_comms"
        operators = {} if is_named else said
        host = (7, 100, 1_000 * number)
        events += [
            complete("cpu_op", operator, *host, 50, **{"External id": number}, **operators),
            complete("cuda_runtime", "cudaLaunchKernel", *host, 3, correlation=number),
            complete(
                "kernel",
                name,
                0,
                7,
                1_000 * number + 100,
                duration,
                **{"External id": number, "correlation": number, "stream": 7},
                **(said if is_named else {}),
            ),
        ]
        kind = None if collective is None else kinds[collective]
        expected_ns["other" if kind is None and "nccl" in name else kind] += duration
    explained = explain(write_trace(tmp_path / "t.json", events))
    ns = {}
    for kind in kinds.values():
        phases = exposed(explained, Collective(kind)).values()
        ns[kind] = sum(sum(total) for total, _ in phases)
    assert ns == {kind: time for kind, time in expected_ns.items() if kind is not None}
    by_class = sum(
        each_ns([times.total_s])[0]
        for times in explained.classes
        if times.kind is KernelClass.COMMUNICATION
    )
    assert by_class == sum(ns.values())


def test_an_unknown_kernel_in_the_range_of_a_collective_is_a_part_of_it() -> None:
    """Not one whose name tells what it does, and not one of an operator inside the range."""
    recording = Recording(
        [
            Kernel("my_ring", 20, MAIN, 100, 7),
            Kernel("gemm", 21, MAIN, 110, 5),
            Kernel("mystery", 32, MAIN, 120, 3),
            Kernel("mystery", 50, MAIN, 130, 2),
            Kernel("mystery", 20, AUTOGRAD, 140, 1),
        ],
        [Span("step", 0, 200), Span("nccl:all_reduce", 10, 40), Span("copy_in", 30, 35)],
    )
    explained = profile(recording)
    assert sum(sum(total) for total, _ in exposed(explained, Collective.ALL_REDUCE).values()) == 7
    times = {(kernel.kind, kernel.count) for kernel in explained.kernels if kernel.phase is None}
    assert times == {
        (KernelClass.COMMUNICATION, 1),
        (KernelClass.MATMUL, 1),
        (KernelClass.OTHER, 3),
    }


# exposed time, by nanosecond


def random_step_on_ranks(generator: random.Random) -> tuple[Recording, bool]:
    """Steps with kernels of both streams that begin whenever, and whether `communication` waits
    for collectives.
    """
    made, now, waits = Recording(), 10, generator.random() < 0.5
    for _ in range(generator.randint(1, 3)):
        for name in ("forward", "backward", "communication", "optimizer"):
            start = now
            now += generator.randint(5, 120)
            made.spans.append(Span(name, start, now))
            if name == "communication" and waits:
                made.calls.append(
                    Call("cudaStreamWaitEvent_v3020", generator.randint(start, now - 1), now)
                )
            for _ in range(generator.randint(0, 6)):
                launch, duration = generator.randint(start, now - 1), generator.randint(0, 40)
                work, stream = generator.choice(
                    [
                        (ALL_REDUCE, COLLECTIVES),
                        (ALL_GATHER, COLLECTIVES),
                        ("gemm", COMPUTE),
                        ("gemm", COMPUTE),
                    ]
                )
                began = launch + generator.randint(1, 60)
                made.kernels.append(
                    Kernel(
                        work, launch, generator.choice([MAIN, AUTOGRAD]), began, duration, stream
                    )
                )
            if generator.random() < 0.5:
                made.copies.append(
                    Kernel(
                        "memcpy",
                        start,
                        MAIN,
                        start + 5,
                        9,
                        generator.choice([COMPUTE, COLLECTIVES]),
                    )
                )
            now += generator.randint(0, 9)
    return made, waits


def through(kernels: list[Kernel], now: int) -> int:
    """When the last of the kernels launched before `now` has ended."""
    return max(
        [0, *(kernel.start_ns + kernel.duration_ns for kernel in kernels if kernel.launch_ns < now)]
    )


def open_at(kernels: list[Kernel]) -> set[int]:
    return {time for own in kernels for time in range(own.start_ns, own.start_ns + own.duration_ns)}


@pytest.mark.parametrize("seed", range(25))
def test_exposed_is_when_a_collective_runs_and_nothing_computes(seed: int) -> None:
    made, waits = random_step_on_ranks(random.Random(seed))
    sends = [kernel for kernel in made.kernels if kernel.stream == COLLECTIVES]
    # where nothing sends, a copy on the stream of collectives is one like any other
    of_nccl = [copy for copy in made.copies if copy.stream == COLLECTIVES and sends]
    computes = [kernel for kernel in made.kernels + made.copies if kernel not in sends + of_nccl]
    of_main_stream = [kernel for kernel in made.kernels + made.copies if kernel not in sends]
    explained, busy = profile(made), open_at(computes)
    expected: dict[str, list[tuple[int, ...]]] = {}
    spans = sorted(made.spans, key=lambda span: span.start_ns)
    for first in range(0, len(spans), 4):
        last = max(
            spans[first].start_ns, through(made.kernels + made.copies, spans[first].start_ns)
        )
        for span in spans[first : first + 4]:
            if span is not spans[first]:  # what is launched between two phases is of neither
                is_before_wait = waits and span.name in ("backward", "communication")
                running = of_main_stream if is_before_wait else made.kernels + made.copies
                last = max(last, span.start_ns, through(running, span.start_ns))
            leaves = waits and span.name in ("forward", "backward")
            finished = through(
                of_main_stream if leaves else made.kernels + made.copies, span.end_ns
            )
            end = max(last, span.end_ns, finished)
            row = [end - last]
            for chosen in (sends, [own for own in sends if own.name is ALL_GATHER]):
                ran = open_at(chosen) & set(range(last, end))
                row += [len(ran), len(ran - busy)]
            expected.setdefault(span.name, []).append(tuple(row))
            last = end
    assert {name: times for name, times in walls(explained).items() if name in expected} == {
        name: [row[0] for row in rows] for name, rows in expected.items()
    }
    for kind, at in ((None, 1), (Collective.ALL_GATHER, 3)):
        kept = {
            name: ([row[at] for row in rows], [row[at + 1] for row in rows])
            for name, rows in expected.items()
        }
        # a phase in which nothing of the kind ran has no row, but for kernels of no duration
        given = exposed(explained, kind)
        given.pop("unattributed", None)
        assert given == {
            name: times for name, times in kept.items() if any(times[0]) or name in given
        }
    assert sum(
        sum(row.launches) for row in explained.communication if row.collective is None
    ) <= len(sends)
    assert decode_profile(encode_profile(explained)) == explained


def test_copies_to_peers_are_communication_and_not_computing() -> None:
    """They run from 30 to 60 beside a kernel until 40, on a stream of their own that has another
    copy, too.
    """
    made = Recording(
        spans=[Span("backward", 0, 100)],
        kernels=[Kernel("gemm", 5, start_ns=10, duration_ns=30, stream=COMPUTE)],
        copies=[
            Kernel(
                "Memcpy PtoP (Device -> Device)", 6, start_ns=30, duration_ns=20, stream=COLLECTIVES
            ),
            Kernel(
                "Memcpy PtoP (Device -> Device)", 7, start_ns=50, duration_ns=10, stream=COLLECTIVES
            ),
            Kernel(
                "Memcpy DtoD (Device -> Device)", 8, start_ns=60, duration_ns=5, stream=COLLECTIVES
            ),
        ],
    )
    explained = profile(made)
    assert (
        exposed(explained, Collective.COPY_TO_PEERS)
        == exposed(explained)
        == {"backward": ([30], [20])}
    )
    assert sum(sum(row.launches) for row in explained.communication if row.collective is None) == 2


def test_collectives_belong_to_no_module_but_to_a_gather() -> None:
    """Hooks launch them while a module's range is open; PyTorch and NCCL put ranges of their own
    around them.
    """
    spans = [Span("forward", 0, 100), Span("block.0", 10, 90), Span("ffn", 20, 80)]
    spans += [Span("gather layers.1", 30, 40), Span("nccl:_all_gather_base", 32, 38)]
    spans += [
        Span("nccl:all_reduce", 50, 60),
        Span("ncclAllReduce", 52, 58),
        Span("gloo:all_gather", 56, 57),
    ]
    launches = {"gemm": 25, "cast": 31, ALL_GATHER: 35, ALL_REDUCE: 55, "norm": 56}
    explained = profile(
        Recording([Kernel(name, at, start_ns=at + 100) for name, at in launches.items()], spans)
    )
    in_ffn, gather = ("block.0", "ffn"), ("gather layers.1",)
    assert {row.path: row.count for row in explained.modules} == {in_ffn: 2, gather: 2, (): 1}


# ranks


def rank_recording(rank: int, durations: tuple[int, ...]) -> Recording:
    """Two steps of one rank; the second half of its collectives is in the second."""
    process = (rank + 7) << 24
    made = Recording(spans=[Span(rank_range(rank), 0, 2_000, process + 1)])
    half = len(durations) // 2
    for step, own in enumerate((durations[:half], durations[half:])):
        begun = 1_000 * step
        made.spans.append(Span("forward", begun + 1, begun + 500, process + 1))
        for number, duration in enumerate(own):
            at = begun + 10 + 100 * number
            made.kernels.append(Kernel(ALL_REDUCE, at, process + 1, at + 5, duration, COLLECTIVES))
    return made


def together(*recordings: Recording) -> Recording:
    return Recording(
        [kernel for own in recordings for kernel in own.kernels],
        [span for own in recordings for span in own.spans],
    )


def times_of(
    profiles: list[tuple[int, StepProfile]], parts: list[Attribution]
) -> tuple[RankTimes, ...]:
    return rank_times(profiles, met(list(map(collectives_of, parts)), profiles))


@pytest.mark.parametrize("through_file", [False, True])
def test_one_report_is_split_into_its_ranks_and_waits_are_found(
    tmp_path: Path, through_file: bool
) -> None:
    """Rank 1 comes first to the first collective of a step, and last to the others."""
    made = together(rank_recording(1, (50, 10, 10, 30)), rank_recording(0, (20, 15, 40, 30)))
    if through_file:
        explained = explain(write_export(tmp_path / "two.sqlite", made, same_correlation=True))
        ranks = explained.ranks
    else:
        parts = [attribute(trace) for trace in by_rank(make_trace(made)).values()]
        profiles = [(rank, summarise(part, source="test")) for rank, part in enumerate(parts)]
        ranks, explained = times_of(profiles, parts), profiles[0][1]
    assert [own.rank for own in ranks] == [0, 1]
    # the shortest kernels are 20, 10 and 10, 30
    assert [each_ns(own.waited_s) for own in ranks] == [[5, 30], [30, 0]]
    assert [
        exposed(replace(explained, communication=own.communication))["forward"][0] for own in ranks
    ] == [[35, 70], [60, 40]]
    assert each_ns(explained.phases[0].kernel_s) == [35, 70]


def test_waits_are_unknown_where_ranks_differ_and_a_single_rank_is_not_split() -> None:
    one, other = rank_recording(0, (10, 20)), rank_recording(1, (10, 20))
    other.kernels[1] = replace(other.kernels[1], name=ALL_GATHER)
    parts = [attribute(trace) for trace in by_rank(make_trace(together(one, other))).values()]
    profiles = [(rank, summarise(own, source="test")) for rank, own in enumerate(parts)]
    assert [
        own.waited_s
        for own in rank_times(profiles, met(list(map(collectives_of, parts)), profiles))
    ] == [None, None]
    assert list(by_rank(make_trace(one))) == [0]


def test_a_process_with_hardly_any_work_is_left_out() -> None:
    """Its ranges too, which would be phases of the other one."""
    made, helper = (
        training(2),
        Recording([Kernel("k", 5, 9 << 24)], [Span("forward", 0, 10**9, 9 << 24)]),
    )
    (alone,) = by_rank(make_trace(together(made, helper))).values()
    assert totals(attribute(alone)) == totals(attribute(make_trace(made)))
    assert alone.notes == ("1 kernels of 1 processes with less work are left out.",)


# a real trace of two GPUs


def raster(events: list[dict], low: int, length: int) -> np.ndarray:
    """Whether any of the events is open, by nanosecond."""
    is_open = np.zeros(length, dtype=np.bool_)
    for event in events:
        start = round(event["ts"] * 1e3) - low
        is_open[max(start, 0) : max(start + round(event["dur"] * 1e3), 0)] = True
    return is_open


def test_exposed_time_of_two_h200_read_in_another_way() -> None:
    """Over each step, from its launch to its last kernel, which is that of the optimizer."""
    explained = explain(REAL)
    assert [own.rank for own in explained.ranks] == [0, 1]
    for own, path in zip(
        explained.ranks, (REAL, REAL.with_name(f"rank1_{REAL.name}")), strict=True
    ):
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        steps = sorted((e for e in events if e["name"] == "step"), key=lambda e: e["ts"])
        on_device = [e for e in events if e["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
        total_ns, exposed_ns = [], []
        for step in steps:
            low, length = round(step["ts"] * 1e3), round(step["dur"] * 1e3)
            sends, computes = (
                raster(
                    [e for e in on_device if e["name"].startswith("nccl") == is_nccl], low, length
                )
                for is_nccl in (True, False)
            )
            total_ns.append(int(sends.sum()))
            exposed_ns.append(int((sends & ~computes).sum()))
        rows = [row for row in own.communication if row.collective is Collective.ALL_REDUCE]
        assert [
            sum(each_ns(each)) for each in zip(*(row.total_s for row in rows), strict=True)
        ] == pytest.approx(total_ns, abs=3)
        assert [
            sum(each_ns(each)) for each in zip(*(row.exposed_s for row in rows), strict=True)
        ] == pytest.approx(exposed_ns, abs=3)
        assert sum(exposed_ns) > 1_000_000


def test_phases_of_two_h200_are_those_of_their_clock() -> None:
    """In ms, by CUDA events that each rank recorded in the same steps; one event takes some µs."""
    clocks = {
        0: {
            "forward": (23.507, 18.806),
            "backward": (35.365, 34.640),
            "communication": (1.742, 6.806),
            "optimizer": (1.594, 1.053),
        },
        1: {
            "forward": (18.166, 21.474),
            "backward": (34.396, 42.402),
            "communication": (9.056, 2.013),
            "optimizer": (1.062, 1.915),
        },
    }
    for own in explain(REAL).ranks:
        by_phase: dict[str, PhaseTimes] = {times.phase.value: times for times in own.phases}
        for name, clock_ms in clocks[own.rank].items():
            assert [1e3 * wall_s for wall_s in by_phase[name].wall_s] == pytest.approx(
                clock_ms, rel=0.01, abs=0.15
            )


def test_the_other_ranks_of_a_file_are_found_beside_it(tmp_path: Path) -> None:
    alone = shutil.copy(REAL, tmp_path / "t.json.gz")
    config = RunConfig(size="small", model=SIZES["small"], parallel=Parallel.DDP_OVERLAP, ranks=2)
    assert explain(alone, config).ranks == ()
    assert any("1 of 2 ranks" in note for note in explain(alone, config).notes)
    other = shutil.copy(REAL.with_name(f"rank1_{REAL.name}"), tmp_path / "rank1_t.json.gz")
    both = explain(alone, config)
    assert both.notes == ()
    assert any("1 of 2 ranks" in note for note in explain(other, config).notes)
    assert [own.rank for own in both.ranks] == [0, 1]
    assert both.ranks[1].step_s == explain(other).step_s != both.step_s == both.ranks[0].step_s
    assert (without_rank("rank1_t.json.gz"), without_rank("t.json.gz")) == (
        "t.json.gz",
        "t.json.gz",
    )
    assert decode_profile(encode_profile(both)) == both
    other.write_bytes(b"{")
    with pytest.raises(ProfileError, match="rank1_t"):
        explain(alone)


def gathering() -> Recording:
    """Two gathers in forward, with ranges of their own around them."""
    made = Recording(spans=[Span("forward", 0, 70), Span("backward", 100, 200)])
    made.spans += [Span("gather embedding", 2, 6), Span("wait embedding", 18, 20)]
    made.spans += [Span("gather layers.0", 24, 28), Span("wait layers.0", 50, 51)]
    made.kernels = [
        Kernel(ALL_GATHER, 4, start_ns=10, duration_ns=30, stream=COLLECTIVES),
        Kernel("gemm", 22, start_ns=40, duration_ns=60, stream=COMPUTE),
        Kernel(ALL_GATHER, 26, start_ns=40, duration_ns=20, stream=COLLECTIVES),
        Kernel("gemm", 52, start_ns=100, duration_ns=5, stream=COMPUTE),
    ]
    return made


def test_operators_of_a_cpu_start_collectives_and_do_not_tell_how_long_these_take() -> None:
    traces = [replace(make_trace(gathering()), is_of_host=True) for _ in range(2)]
    parts = [attribute(trace) for trace in traces]
    profiles = [(rank, summarise(own, source="test")) for rank, own in enumerate(parts)]
    for own in times_of(profiles, parts):
        assert (own.communication, own.waited_s) == ((), None)


def test_a_report_of_nsys_and_a_trace_of_each_rank_tell_the_same(tmp_path: Path) -> None:
    """Names of ranges differ as they do in real files: PyTorch's around a collective, and
    NCCL's.
    """

    def on_rank(rank: int, around: str) -> Recording:
        made, process = gathering(), (rank + 7) << 24
        made.kernels[2] = replace(made.kernels[2], duration_ns=20 + 7 * rank)
        made.spans += [Span(rank_range(rank), 0, 250), Span(around, 3, 5), Span(around, 25, 27)]
        return Recording(
            [replace(own, thread=process + own.thread - PROCESS) for own in made.kernels],
            [replace(own, thread=process + own.thread - PROCESS) for own in made.spans],
        )

    of_nsys = explain(
        write_export(
            tmp_path / "t.sqlite", together(*(on_rank(rank, "ncclAllGather") for rank in (0, 1)))
        )
    )
    for rank, name in ((0, "t.json"), (1, "rank1_t.json")):
        write_trace(tmp_path / name, events_of(on_rank(rank, "nccl:_all_gather_base")))
    of_kineto = explain(tmp_path / "t.json")
    for part in ("phases", "classes", "communication", "modules", "ranks"):
        assert getattr(of_nsys, part) == getattr(of_kineto, part), part
    assert [each_ns(own.waited_s) for own in of_nsys.ranks] == [[0], [7]]
