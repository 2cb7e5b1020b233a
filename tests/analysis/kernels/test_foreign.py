"""Traces as other programs write them: what is true of each is known from the generator here."""

import gzip
import json
import lzma
import sqlite3
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import pytest

from cs336.analysis.columns import ProfileError
from cs336.analysis.kernels.attribution import attribute
from cs336.analysis.kernels.explain import explain
from cs336.analysis.kernels.kineto_events import BOOKKEEPING
from cs336.analysis.kernels.phase_ranges import RangeNameError, check_names
from cs336.analysis.kernels.readers import read_trace
from cs336.analysis.kernels.step_profile import IdleCause, StepProfile
from cs336.ranges import PhaseNames
from cs336.report.sections.kernels.entry import Explained
from cs336.report.sections.kernels.findings import findings
from tests.analysis.kernels.kineto_files import Event, complete, write_trace
from tests.analysis.kernels.tracing import Recording, Span, ns, training, write_export

MAIN, AUTOGRAD = 1, 2
LAUNCH_NS, GAP_NS = 4_000, 10_000


@dataclass
class Program:
    """A host that launches kernels on one stream; each starts when it is launched and the stream
    is free.
    """

    events: list[Event] = field(default_factory=list)
    now: int = 0
    free: int = 0
    count: int = 0
    device: int = 0
    call: str = "cudaLaunchKernel"

    def launch(
        self,
        name: str,
        duration_ns: int = 40_000,
        /,
        *,
        tid: int = MAIN,
        delay_ns: int = 6_000,
        **args: object,
    ) -> None:
        self.count += 1
        self.events.append(
            complete(
                "cuda_runtime", self.call, 100, tid, self.now, LAUNCH_NS, correlation=self.count
            )
        )
        start = max(self.free, self.now + delay_ns)
        own = {"device": self.device, "stream": 7, "correlation": self.count, **args}
        self.events.append(complete("kernel", name, 0, 7, start, duration_ns) | {"args": own})
        self.free = start + duration_ns
        self.now += GAP_NS

    def copy(self, name: str, duration_ns: int, call: str = "cudaMemcpyAsync") -> None:
        self.count += 1
        self.events.append(
            complete("cuda_runtime", call, 100, MAIN, self.now, LAUNCH_NS, correlation=self.count)
        )
        start = max(self.free, self.now + 6_000)
        self.events.append(
            complete(
                "gpu_memcpy",
                name,
                0,
                7,
                start,
                duration_ns,
                device=0,
                stream=7,
                correlation=self.count,
            )
        )
        self.free = start + duration_ns
        self.now += GAP_NS

    def ranged(self, name: str, begun: int, cat: str = "user_annotation", tid: int = MAIN) -> None:
        self.events.append(complete(cat, name, 100, tid, begun, self.now - begun))

    def wait(self, call: str = "cudaDeviceSynchronize") -> None:
        until = max(self.now, self.free)
        self.events.append(
            complete("cuda_runtime", call, 100, MAIN, self.now, until - self.now + 1_000)
        )
        self.now = until + 1_000


FORWARD, BACKWARD, OPTIMIZER = 6, 12, 3
STEP = {
    "forward": (FORWARD, 240_000),
    "backward": (BACKWARD, 480_000),
    "optimizer": (OPTIMIZER, 30_000),
}
"""Kernels of a step of `plain_loop` and their nanoseconds, by phase."""


def plain_loop(
    steps: int = 4,
    *,
    profiler_steps: bool = True,
    optimizer: bool = True,
    zero_grad: bool = False,
    nodes: bool = False,
    init: int = 0,
    accumulate: int = 1,
) -> Program:
    """A loop without ranges of its own. Backward runs on autograd's thread, or shows its `nodes`
    on the main one.
    """
    made = Program()
    begun = made.now
    for _ in range(init):
        made.launch("fill", 2_000)
    if init:
        made.ranged("init", begun)
    for step in range(steps):
        whole = made.now
        if zero_grad:
            begun, made.now = made.now, made.now + 1_000
            made.ranged("Optimizer.zero_grad#SGD.zero_grad", begun)
        for _ in range(accumulate):
            for _ in range(FORWARD):
                made.launch("gemm_forward")
            begun = made.now
            for _ in range(BACKWARD):
                made.launch("gemm", tid=MAIN if nodes else AUTOGRAD)
            if nodes:
                made.ranged(f"{BOOKKEEPING}MmBackward0", begun, "cpu_op")
        begun = made.now
        for _ in range(OPTIMIZER):
            made.launch("multi_tensor_apply_kernel<adam>", 10_000)
        if optimizer:
            made.ranged("Optimizer.step#AdamW.step", begun)
        made.wait()
        if profiler_steps:
            made.ranged(f"ProfilerStep#{step + 2}", whole)
        made.now += 20_000
    return made


def explained(made: Program, tmp_path: Path, **top: object) -> StepProfile:
    return explain(write_trace(tmp_path / "t.json", made.events, **top))


def by_phase(profile: StepProfile) -> dict[str, tuple[int, int]]:
    """Kernels and nanoseconds of each step, which must be the same in all of them."""
    attributed = {}
    for phase in profile.phases:
        if any(phase.launches):
            assert len(set(phase.launches)) == 1, (phase.phase, phase.launches)
            attributed[str(phase.phase)] = phase.launches[0], ns(phase.kernel_s[0])
    return attributed


def said(profile: StepProfile) -> list[str]:
    return [finding.text for finding in findings(Explained(profile=profile))]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"zero_grad": True},
        {"nodes": True},
        {"profiler_steps": False},
        {"profiler_steps": False, "zero_grad": True},
        {"profiler_steps": False, "init": 40},
        {"init": 5},
        {"optimizer": False},
    ],
    ids=str,
)
def test_a_plain_loop_has_its_steps_and_phases(changes: dict[str, object], tmp_path: Path) -> None:
    """With torch.profiler's steps or without, with the nodes of autograd in the file or only its
    thread.
    """
    profile = explained(plain_loop(**changes), tmp_path)
    assert profile.num_steps == 4
    assert by_phase(profile) == STEP
    assert profile.left.outside == changes.get("init", 0)
    assert not any("ProfilerStep" in name for module in profile.modules for name in module.path)


def test_gradients_of_several_batches_are_of_one_step(tmp_path: Path) -> None:
    twice = {phase: (2 * count, 2 * time_ns) for phase, (count, time_ns) in STEP.items()}
    for steps in (True, False):
        attributed = explained(plain_loop(accumulate=2, profiler_steps=steps), tmp_path)
        assert by_phase(attributed) == twice | {"optimizer": STEP["optimizer"]}
        assert attributed.num_steps == 4


def test_phases_of_the_program_beside_pytorchs_optimizer(tmp_path: Path) -> None:
    made = Program()
    for _ in range(3):
        for name, count in (
            ("Forward", FORWARD),
            ("BACKWARD", BACKWARD),
            ("Optimizer.step#SGD.step", OPTIMIZER),
        ):
            begun = made.now
            for _ in range(count):
                made.launch("k", 10_000 if count == OPTIMIZER else 40_000)
            made.ranged(name, begun)
        made.wait()
    profile = explained(made, tmp_path)
    assert by_phase(profile) == STEP
    assert profile.num_steps == 3


def inference(kernel: str = "gemm") -> Program:
    made = Program()
    for step in range(5):
        begun = made.now
        for _ in range(5):
            made.launch(kernel)
        made.wait()
        made.ranged(f"ProfilerStep#{step}", begun)
    return made


def test_inference_has_no_backward(tmp_path: Path) -> None:
    profile = explained(inference(), tmp_path)
    assert (profile.num_steps, by_phase(profile)) == (5, {"forward": (5, 200_000)})
    unknown = explained(inference("layer_norm_backward"), tmp_path)
    assert (unknown.num_steps, by_phase(unknown)) == (5, {"unattributed": (5, 200_000)})


def test_a_step_may_be_a_pattern_and_a_name_is_of_any_case(tmp_path: Path) -> None:
    trace = read_trace(write_trace(tmp_path / "t.json", plain_loop().events))
    for names, steps in (("ProfilerStep#*", 4), ("profilerstep#[23]", 2), ("ProfilerStep#3", 1)):
        check_names(trace, PhaseNames(step=names))
        assert len(attribute(trace, PhaseNames(step=names)).plan.steps) == steps
    with pytest.raises(RangeNameError, match=r"names are: ProfilerStep#\*, Optimizer"):
        check_names(trace, PhaseNames(step="ProfilerStep*9"))


def test_ranges_of_unknown_names_are_proposed_as_flags(tmp_path: Path) -> None:
    made = Program()
    for step in range(2):
        whole = made.now
        for name in ("fwd pass", "bwd pass"):
            begun = made.now
            made.launch("k")
            made.ranged(name, begun)
        made.wait()
        made.ranged(f"train_step {step}", whole)
    note = " ".join(explained(made, tmp_path).notes)
    assert "--forward 'fwd pass' --backward 'bwd pass' --step 'train_step *'" in note
    attributed = attribute(
        read_trace(tmp_path / "t.json"),
        PhaseNames(forward="fwd pass", backward="bwd*", step="train*"),
    )
    assert len(attributed.plan.steps) == 2


def test_what_is_measured_needs_no_phases(tmp_path: Path) -> None:
    made = inference()
    made.events = [
        event for event in made.events if not str(event["name"]).startswith("ProfilerStep")
    ]
    made.launch("after")
    made.events.append(complete("user_annotation", "look here", 100, MAIN, 0, 60_000))
    path = write_trace(tmp_path / "t.json", made.events)
    profile = explain(path, phases=PhaseNames(measure="look here"))
    launched = sum(
        event["name"] == "cudaLaunchKernel" and event["ts"] < made.events[0]["ts"] + 60
        for event in made.events
    )
    assert (profile.num_steps, sum(map(sum, (p.launches for p in profile.phases)))) == (1, launched)


def renamed(made: Program, categories: dict[str, str]) -> list[Event]:
    return [
        {**event, "cat": categories.get(str(event["cat"]), event["cat"])} for event in made.events
    ]


OF_DEVICES = {
    "torch 1.8": {
        "kernel": "Kernel",
        "cuda_runtime": "Runtime",
        "user_annotation": "Operator",
        "cpu_op": "Operator",
    },
    "XPU": {"cuda_runtime": "xpu_runtime"},
    "MTIA": {"kernel": "mtia_ccp_events", "cuda_runtime": "mtia_runtime"},
    "other": {"cuda_runtime": "privateuse1_runtime"},
}


@pytest.mark.parametrize("categories", OF_DEVICES.values(), ids=OF_DEVICES)
def test_categories_of_other_devices_and_versions_are_read(
    categories: dict[str, str], tmp_path: Path
) -> None:
    made = plain_loop(nodes=True)
    made.events.append(complete("cpu_op", "aten::mm", 100, MAIN, 0, 10))
    profile = explain(write_trace(tmp_path / "t.json", renamed(made, categories)))
    assert by_phase(profile) == STEP
    assert not any("aten" in name for module in profile.modules for name in module.path)


def test_tasks_of_an_npu_are_kernels(tmp_path: Path) -> None:
    """Without categories, and with times as text."""
    tasks = [
        {
            "ph": "X",
            "name": f"MatMul{i}",
            "pid": 3,
            "tid": 8,
            "ts": f"{5 + i}.125",
            "dur": 0.5,
            "args": {"Task Type": kind},
        }
        for i, kind in enumerate(("AI_CORE", "MIX_AIC", "EVENT_WAIT"))
    ]
    trace = read_trace(write_trace(tmp_path / "t.json", tasks))
    assert trace.kernels.duration_ns.tolist() == [500, 500]
    assert trace.kernels.start_ns.tolist() == [5_125, 6_125]


def test_numbers_as_text_are_numbers(tmp_path: Path) -> None:
    made = plain_loop()
    for event in made.events:
        args = event["args"]
        assert isinstance(args, dict)
        event["args"] = {
            name: hex(value) if name == "stream" else str(value) for name, value in args.items()
        }
    assert by_phase(explained(made, tmp_path)) == STEP


def test_an_archive_with_one_trace_is_that_trace(tmp_path: Path) -> None:
    plain = write_trace(tmp_path / "t.json", plain_loop().events)
    wanted = by_phase(explain(plain))
    path = tmp_path / "t.zip"
    for name, data in (
        ("t.json", plain.read_bytes()),
        ("t.json.gz", gzip.compress(plain.read_bytes())),
    ):
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.mkdir("rank0")
            archive.writestr(f"rank0/{name}", data)
        assert by_phase(explain(path)) == wanted
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("other.json", "{}")
    with pytest.raises(ProfileError, match="got 2 files"):
        explain(path)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ProfileError, match="copy it again"):
        explain(path)


def test_paths_of_windows_are_read(tmp_path: Path) -> None:
    """Their backslashes make the JSON invalid where what follows is no escape."""
    made = plain_loop()
    made.ranged("PLACE", 0)
    text = json.dumps({"traceEvents": made.events}).replace(
        "PLACE", r"D:\Users\jo\code.py \"x\" \u00e9"
    )
    path = tmp_path / "t.json"
    path.write_text(text)
    assert by_phase(explain(path)) == STEP
    assert any(
        r"D:\Users\jo\code.py" in name and 'x" \u00e9' in name for name in read_trace(path).strings
    )


def emit_nvtx() -> Iterator[Span]:
    """What `nsys --pytorch=autograd-nvtx` and emit_nvtx add to the ranges: the number of each
    call.
    """
    for number, span in enumerate(training(4, phases=False, around="x").spans):
        name = (
            f"aten::{span.name}, op_id = {number}, seq = {number + 3}" if span.name != "x" else "x"
        )
        yield Span(name, span.start_ns, span.end_ns, span.thread)


def test_calls_of_an_operator_are_one_module(tmp_path: Path) -> None:
    made = training(4, phases=False, around="x")
    profile = explain(
        write_export(tmp_path / "t.sqlite", Recording(made.kernels, list(emit_nvtx())))
    )
    assert {module.path for module in profile.modules} == {
        (),
        ("aten::block",),
        ("aten::block", "aten::linear"),
        ("aten::block", "aten::scores"),
        ("aten::head",),
    }


@pytest.mark.parametrize(
    ("traced", "per_layer"),
    [
        (
            "autograd-nvtx",
            {
                "aten::native_layer_norm": 2,
                "aten::clamp_min": 1,
                "aten::_efficient_attention_forward": 1,
            },
        ),
        (
            "functions-trace",
            {
                "torch.nn.functional.layer_norm": 2,
                "torch.nn.functional.relu": 1,
                "torch.nn.functional.scaled_dot_product_attention": 1,
            },
        ),
    ],
)
def test_a_program_without_ranges_under_nsys_pytorch(
    traced: str, per_layer: dict[str, int], tmp_path: Path
) -> None:
    """Six steps of an encoder of three layers and a head, recorded on an H100 by `nsys profile
    --pytorch=...`.
    """
    path = tmp_path / "t.sqlite"
    path.write_bytes(
        lzma.decompress((Path(__file__).parent / "reports" / f"{traced}.sqlite.xz").read_bytes())
    )
    profile = explain(path)
    with sqlite3.connect(path) as report:
        (kernels,) = report.execute("SELECT count(*) FROM CUPTI_ACTIVITY_KIND_KERNEL").fetchone()
    assert profile.num_steps == 6
    assert sum(sum(phase.launches) for phase in profile.phases) + profile.left.outside == kernels
    counts: Counter[str] = Counter()
    for module in profile.modules:
        if module.path and module.phase == "forward":
            counts[module.path[-1]] += module.count
    assert {name: counts[name] for name in per_layer} == {
        name: 6 * 3 * count for name, count in per_layer.items()
    }
    products = [
        each.count for each in profile.kernels if each.phase == "forward" and "gemm" in each.name
    ]
    assert sum(products) == 6 * (3 * 4 + 1)


def test_modules_of_a_cuda_graph_are_those_that_pytorch_marked(tmp_path: Path) -> None:
    made = Program(call="cudaGraphLaunch")
    for name, phase in (("attention", None), ("attention", "backward"), ("", None)):
        made.launch(
            "k", **{"graph node id": 5, "name": name} | ({"autograd_phase": phase} if phase else {})
        )
    made.ranged("forward", 0)
    profile = explained(made, tmp_path)
    assert {module.path: module.count for module in profile.modules} == {
        ("attention",): 1,
        ("attention (backward)",): 1,
        (): 1,
    }
    assert any("2 of them" in note for note in profile.notes)


def stepped(
    parts: Sequence[Callable[[Program], object]], steps: int = 3, **changes: str
) -> Program:
    """Steps in which each part is called in forward; the host waits at the end."""
    made = Program(**changes)
    for _ in range(steps):
        begun = made.now
        for part in parts:
            part(made)
        made.ranged("forward", begun)
        made.wait()
        made.ranged("step", begun)
    return made


@pytest.mark.parametrize(
    ("name", "kind", "advice"),
    [
        ("Memcpy HtoD (Pageable -> Device)", "host to device, pageable", "pin"),
        ("Memcpy HtoD (Pinned -> Device)", "host to device, pinned", "stream of its own"),
        ("Memcpy DtoH (Device -> Pageable)", "device to host, pageable", "less often"),
        ("Memcpy DtoD (Device -> Device)", "device to device", ""),
        ("CopyHostToDevice", "host to device", "stream of its own"),
        ("Memset (Device)", "fill", ""),
    ],
)
def test_copies_are_time(name: str, kind: str, advice: str, tmp_path: Path) -> None:
    """40 ms of copies and 1 ms of kernels a step: what limits is the copies, and fp32 does not
    matter.
    """
    parts = [
        lambda made: made.copy(name, 40_000_000),
        *[lambda made: made.launch("ampere_sgemm", 200_000)] * 5,
    ]
    profile = explained(stepped(parts), tmp_path)
    (own, every) = profile.copies
    assert (own.kind, own.count, ns(own.total_s), ns(own.alone_s)) == (
        kind,
        3,
        120_000_000,
        120_000_000,
    )
    assert replace(own, kind=None) == every
    first, *others = said(profile)
    assert first.startswith("Copies limit the step: for 40.0 ms")
    assert advice in first
    assert not any("fp32" in text for text in others)


def test_copies_beside_kernels_cost_nothing(tmp_path: Path) -> None:
    """A copy of 100 us on a stream of its own, of which a kernel covers 60."""
    made = stepped(
        [
            lambda made: made.launch("k", 60_000),
            lambda made: made.copy("Memcpy HtoD (Pinned -> Device)", 100_000),
        ]
    )
    for event in made.events:
        if event["cat"] == "gpu_memcpy":
            event["ts"] = cast("float", event["ts"]) - 60
    (own, _) = explained(made, tmp_path).copies
    assert (ns(own.total_s), ns(own.alone_s)) == (300_000, 120_000)


def test_a_host_that_runs_ahead_waits_for_nothing(tmp_path: Path) -> None:
    """8 steps of 21 kernels of 40 us, launched every 10: a step is what the device takes from
    one to the next.
    """
    made = Program()
    for _ in range(8):
        begun = made.now
        for _ in range(21):
            made.launch("k")
        made.ranged("forward", begun)
    profile = explained(made, tmp_path)
    walls = [round(time_s * 1e6) for time_s in profile.phases[0].wall_s]
    assert walls[1:] == [840] * 7
    assert "the host runs ahead" in said(profile)[0]
    assert profile.pictured is not None
    assert profile.pictured.wall_s == pytest.approx(840e-6, abs=7e-6)
    assert not any("waiting for launches" in text for text in said(profile))


def test_one_gap_is_told_apart_from_many(tmp_path: Path) -> None:
    """Kernels launched early, with 1 us between them but once 40 ms: nobody launched late."""

    def gap(made: Program) -> None:
        made.free += 40_000_000

    def kernels(made: Program) -> None:
        for _ in range(200):
            made.launch("k", 20_000)
            made.free += 1_000

    profile = explained(stepped([kernels, gap, kernels], 1), tmp_path)
    (between,) = (row for row in profile.idle if row.cause is IdleCause.BETWEEN_KERNELS)
    assert (ns(between.median_s or 0), ns(between.longest_s or 0)) == (1_000, 40_001_000)
    text = said(profile)[1]
    assert "One idle time of 40.0 ms stands out" in text
    assert "not at fault" in text
    assert not any("torch.compile" in text for text in said(profile))


def shifted(event: Event) -> None:
    event["ts"] = cast("float", event["ts"]) - 2_000


def emptied(event: Event) -> None:
    event["dur"] = 0


def lengthened(event: Event) -> None:
    event["dur"] = 1_600_000


@pytest.mark.parametrize(
    ("change", "rows", "count", "words"),
    [
        (shifted, range(84), 84, "begin before the call"),
        (emptied, range(7), 7, "last no time"),
        (lengthened, [40], 43, "begin and end while another"),
        (lengthened, [83], 1, "return before its work ends"),
        (None, range(30, 35), 5, "no kernel in the file"),
    ],
    ids=["early", "empty", "covering", "over the end", "lost"],
)
def test_what_cannot_be_is_said(
    change: Callable[[Event], None] | None,
    rows: Sequence[int],
    count: int,
    words: str,
    tmp_path: Path,
) -> None:
    """Of 84 kernels: some changed or left out, and the verdict is doubted."""
    made = plain_loop()
    kernels = [event for event in made.events if event["cat"] == "kernel"]
    for row in rows:
        change(kernels[row]) if change else made.events.remove(kernels[row])
    profile = explained(made, tmp_path)
    (doubt,) = (text for text in profile.doubts if words in text)
    assert doubt.startswith(f"{count} ")
    assert "doubt" in said(profile)[0]
    assert profile.num_kernels == 84 - (0 if change else 5)
    assert explained(plain_loop(), tmp_path).doubts == ()


def test_launches_into_a_graph_are_not_lost(tmp_path: Path) -> None:
    made = plain_loop()
    made.now //= 2  # within a step
    for name in (
        "cudaStreamBeginCapture",
        "cudaLaunchKernel",
        "cudaLaunchKernel",
        "cudaStreamEndCapture",
    ):
        made.events.append(
            complete("cuda_runtime", name, 100, MAIN, made.now, 1_000, correlation=9_000 + made.now)
        )
        made.now += 2_000
    assert not explained(made, tmp_path).doubts
    made.events.append(
        complete(
            "cuda_runtime", "hipModuleLaunchKernel", 100, MAIN, made.now, 1_000, correlation=99_999
        )
    )
    assert explained(made, tmp_path).doubts


def test_steps_that_were_not_recorded_are_no_steps(tmp_path: Path) -> None:
    """Of six steps one launched nothing, one lost its kernels, and one ended before anything was
    recorded.
    """
    made = inference()
    begun, made.now = made.now, made.now + 1_000
    made.ranged("ProfilerStep#5", begun)
    made.wait()
    last = [event for event in made.events if event["cat"] == "kernel"][-5:]
    made.events = [event for event in made.events if event not in last]
    made.events.append(complete("user_annotation", "ProfilerStep#7", 100, MAIN, -2_000, 1_000))
    profile = explained(made, tmp_path)
    assert profile.num_steps == 5
    assert [phase.launches for phase in profile.phases if any(phase.launches)] == [(5, 5, 5, 5, 0)]
    assert sum("2 of 7 steps" in note for note in profile.notes) == 1
    assert sum("1 of 7 steps" in note for note in profile.notes) == 1


def test_the_rank_is_that_of_the_file(tmp_path: Path) -> None:
    made = plain_loop()
    assert explained(made, tmp_path).rank is None
    assert (
        explained(
            made, tmp_path, distributedInfo={"backend": "nccl", "rank": 3, "world_size": 8}
        ).rank
        == 3
    )
    assert explained(made, tmp_path, distributedInfo={"rank": "none"}).rank is None


def test_two_gpus_of_one_process_are_two_ranks(tmp_path: Path) -> None:
    """Each with its own count and time; a second GPU that hardly works is none."""
    one, other = plain_loop(), plain_loop()
    for event in other.events:
        event["args"] = cast("dict[str, object]", event["args"]) | {
            "device": 1,
            "correlation": 10_000 + (cast("dict[str, int]", event["args"]).get("correlation", 0)),
        }
    second = [event for event in other.events if event["cat"] != "user_annotation"]
    both = explain(write_trace(tmp_path / "t.json", [*one.events, *second]))
    assert [rank.rank for rank in both.ranks] == [0, 1]
    assert both.num_kernels == 84
    assert by_phase(both) == STEP
    assert [
        [sum(phase.launches) for phase in rank.phases if any(phase.launches)] for rank in both.ranks
    ] == [[24, 48, 12], [24, 48, 12]]
    few = [event for event in second if event["cat"] == "kernel"][:2]
    alone = explain(write_trace(tmp_path / "t.json", [*one.events, *few]))
    assert (alone.ranks, alone.num_kernels) == ((), 86)
