"""Simulates the hosts and devices of a program to the nanosecond, so that the truth is known.

A `Machine` is a rank: threads of a host launch work, and streams run it in order. A `Run` is a
program on all ranks, which meet in collectives.
"""

import random
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from tests.analysis.kernels.drawn_plans import (
    COMMUNICATION,
    COMPUTE,
    MAIN,
    MICROSECOND,
    STYLES,
    Pause,
    Plan,
)

COLLECTIVES = {
    "all-reduce": ("AllReduce_Sum_bf16", "allreduce"),
    "all-gather": ("AllGather", "_allgather_base"),
    "reduce-scatter": ("ReduceScatter_Sum_bf16", "_reduce_scatter_base"),
}
"""A part of the kernel's name of each collective, and its name in `record_param_comms`."""
NCCL = "ncclDevKernel_{}_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


@dataclass(slots=True)
class Span:
    """A range, an operator, a call of the runtime or a Python frame on a thread of the host."""

    kind: str
    name: str
    thread: int
    start_ns: int
    end_ns: int
    means: str = ""
    number: int = -1
    args: dict[str, object] = field(default_factory=dict)


@dataclass(slots=True)
class Job:
    """A kernel or a copy, with what the program knows of it."""

    kind: str
    name: str
    device: int
    stream: int
    start_ns: int
    end_ns: int
    launch: Span
    phase: str
    step: int
    """The step of the optimizer or of the server; -1 outside of all."""
    micro: int
    module: tuple[str, ...]
    is_in_graph: bool
    collective: str = ""
    num_bytes: int = 0


@dataclass(slots=True)
class Doing:
    """A time in which the host did something besides launching."""

    start_ns: int
    end_ns: int
    what: str
    phase: str


@dataclass
class Machine:
    """One rank: a host that launches work, and devices whose streams run it in order."""

    plan: Plan
    slowness: float = 1.0
    now: int = 0
    thread: int = MAIN
    spans: list[Span] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    free: defaultdict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))
    doing: list["Doing"] = field(default_factory=list)
    graph: Span | None = None

    def call(self, name: str, duration_ns: int) -> Span:
        call = Span("call", name, self.thread, self.now, self.now + duration_ns)
        self.spans.append(call)
        self.now += duration_ns
        return call

    def wait(self, until: int, name: str, phase: str) -> None:
        """A call that returns when the device has come so far."""
        begun = self.now
        self.call(name, max(until - self.now, 0) + 2 * MICROSECOND)
        self.doing.append(Doing(begun, self.now, Pause.WAITING, phase))

    def spend(self, duration_ns: int, what: str, phase: str) -> None:
        self.doing.append(Doing(self.now, self.now + duration_ns, what, phase))
        self.now += duration_ns

    def launching(self, name: str, pace_ns: int, share: float) -> Span:
        """The call that launches, which waits while the queue of the device is full."""
        self.now += int(pace_ns * (1 - share))
        depth = self.plan.queue
        oldest = self.jobs[-depth].end_ns if len(self.jobs) >= depth else 0
        begun, blocked = self.now, max(oldest - self.now, 0)
        call = self.call(name, blocked + int(pace_ns * share))
        if blocked:
            self.doing.append(Doing(begun, self.now, Pause.WAITING, ""))
        return call

    @property
    def done(self) -> int:
        return max(self.free.values(), default=0)


class Run:
    """All ranks of a program, which do the same and differ in speed."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.random = plan, random.Random(plan.seed)
        self.machines = [Machine(plan) for _ in range(plan.ranks)]
        if plan.limit == "ranks":
            self.machines[plan.slow_rank].slowness = 1.6
        self.phase, self.step, self.micro, self.device = "", -1, 0, 0
        self.modules: tuple[str, ...] = ()
        is_host = plan.limit == "host"
        self.kernel_ns = 5 * MICROSECOND if is_host else 60 * MICROSECOND
        self.pace_ns = 25 * MICROSECOND if is_host else 5 * MICROSECOND
        self.counts: dict[int, int] = {}
        """The last number of each thread."""
        self.nodes: list[int] = []
        """Numbers of the operators of forward that have a node of backward, by layer."""
        self.kinds: list[str] = []
        """What each step is: `prefill 4 4096`, `decode 32 32`, or empty."""

    @contextmanager
    def span(self, kind: str, name: str, means: str = "", **args: object) -> Iterator[None]:
        if self.machines[0].graph is not None:
            yield  # nothing of the host is repeated with a graph
            return
        opened = []
        for machine in self.machines:
            span = Span(kind, name, machine.thread, machine.now, -1, means, self.step, dict(args))
            machine.spans.append(span)
            machine.now += 200 + len(name)
            opened.append(span)
        yield
        for machine, span in zip(self.machines, opened, strict=True):
            machine.now += 100
            span.end_ns = machine.now

    def sequence(self) -> dict[str, object]:
        """The arguments of an operator of forward that makes a node of backward; threads number
        theirs apart, so that those of a recomputation have the numbers of forward.
        """
        thread = self.machines[0].thread
        self.counts[thread] = self.counts.get(thread, -1) + 1
        return {"Sequence number": self.counts[thread], "Fwd thread id": 0}

    @contextmanager
    def region(self, means: str, **words: object) -> Iterator[None]:
        """A part of the program, in a range if the style names such parts."""
        name = STYLES[self.plan.style].get(means)
        with ExitStack() as stack:
            if name is not None:
                stack.enter_context(self.span("range", name.format_map(words), means))
            yield

    @contextmanager
    def in_phase(self, phase: str) -> Iterator[None]:
        before, self.phase = self.phase, phase
        with self.region(phase):
            yield
        self.phase = before

    @contextmanager
    def on_thread(self, thread: int) -> Iterator[None]:
        for machine in self.machines:
            machine.thread = thread
            machine.now += 3 * MICROSECOND
        yield
        for machine in self.machines:
            machine.thread = MAIN
            machine.now += 3 * MICROSECOND

    @contextmanager
    def beside(self, thread: int) -> Iterator[None]:
        """Another thread of the host, which works while the main one goes on."""
        before = [machine.now for machine in self.machines]
        with self.on_thread(thread):
            yield
        for machine, now in zip(self.machines, before, strict=True):
            machine.now = now

    @contextmanager
    def module(self, name: str, *, is_called: bool = True) -> Iterator[None]:
        """A module; only where it is called there is a frame of Python, so not in backward."""
        before, self.modules = self.modules, (*self.modules, name)
        with ExitStack() as stack:
            if self.plan.modules and is_called:
                stack.enter_context(self.span("frame", f"nn.Module: {name}"))
            yield
        self.modules = before

    @contextmanager
    def captured(self, is_captured: bool) -> Iterator[None]:
        """Launch all work within as one CUDA graph."""
        if not is_captured:
            yield
            return
        for machine in self.machines:
            machine.graph = machine.call("cudaGraphLaunch", 12 * MICROSECOND)
        yield
        for machine in self.machines:
            machine.graph = None

    def spend(self, duration_ns: int, what: str) -> None:
        for machine in self.machines:
            duration = int(duration_ns * self.random.uniform(0.9, 1.1))
            machine.spend(duration, what, self.phase)

    def wait(self, name: str = "cudaDeviceSynchronize") -> None:
        for machine in self.machines:
            machine.wait(machine.done, name, self.phase)

    def join(self, stream: int, other: int) -> None:
        """Let one stream wait for all work of another."""
        for machine in self.machines:
            key = self.device, stream
            machine.free[key] = max(machine.free[key], machine.free[self.device, other])
            if machine.graph is None:
                machine.call("cudaStreamWaitEvent", MICROSECOND)

    def costs(self, name: str, kind: str, duration_ns: int) -> tuple[int, float, int]:
        """How long a kernel or copy runs, which part of the usual time the host needs to launch
        it, and how long its stream pauses before it.
        """
        return duration_ns, 1.0, 700

    def launch(
        self,
        name: str,
        duration_ns: int = 0,
        /,
        *,
        stream: int = COMPUTE,
        kind: str = "kernel",
        call: str = "cudaLaunchKernel",
        operator: str = "",
        **args: object,
    ) -> list[Job]:
        """Launch a kernel or a copy, from within an operator if one is named."""
        duration = duration_ns or int(self.kernel_ns * self.random.uniform(0.5, 1.5))
        duration, rate, between = self.costs(name, kind, duration)
        jobs = []
        with ExitStack() as stack:
            if operator:
                stack.enter_context(self.span("operator", operator, **args))
            for machine in self.machines:
                launch = machine.graph
                if launch is None:
                    pace = int(rate * self.pace_ns * self.random.uniform(0.7, 1.4))
                    if name.startswith("triton_"):
                        call = "cuLaunchKernelEx"  # Triton launches by the driver itself
                    launch = machine.launching(call, pace, self.random.uniform(0.3, 0.6))
                key = self.device, stream
                start = max(machine.free[key] + between, launch.start_ns + 6 * MICROSECOND)
                end = start + int(duration * machine.slowness) + self.random.randrange(50)
                machine.free[key] = end
                jobs.append(
                    Job(
                        kind,
                        name,
                        *key,
                        start,
                        end,
                        launch,
                        self.phase,
                        self.step,
                        self.micro,
                        self.modules,
                        machine.graph is not None,
                    )
                )
                machine.jobs.append(jobs[-1])
        return jobs

    def copy(self, name: str, duration_ns: int, stream: int = COMPUTE) -> None:
        """A copy; one of pageable memory returns when it is done."""
        jobs = self.launch(
            name,
            duration_ns,
            stream=stream,
            kind="copy",
            call="cudaMemcpyAsync",
            operator="aten::copy_",
        )
        if "Pageable" in name:
            for machine, job in zip(self.machines, jobs, strict=True):
                machine.wait(job.end_ns, "cudaStreamSynchronize", self.phase)

    def move_to(self, device: int) -> None:
        """Copy what was computed to another device, whose work waits for it."""
        if device == self.device:
            return
        peers = f"Device {self.device} -> Device {device}"
        jobs = self.launch(
            f"Memcpy PtoP ({peers})", 4 * MICROSECOND, kind="copy", call="cudaMemcpyPeerAsync"
        )
        self.device = device
        for machine, job in zip(self.machines, jobs, strict=True):
            key = device, COMPUTE
            machine.free[key] = max(machine.free[key], job.end_ns)

    def collective(self, name: str, num_bytes: int) -> None:
        """A collective, which ends on all ranks together: their clocks agree here."""
        self.join(COMMUNICATION, COMPUTE)
        kernel, of_torch = COLLECTIVES[name]
        arguments: dict[str, object] = {
            "Collective name": of_torch,
            "In msg nelems": num_bytes // 2,
            "Out msg nelems": num_bytes // 2,
            "Group size": self.plan.ranks,
            "dtype": "BFloat16",
            "Process Group Name": "0",
            "Process Group Description": "default_pg",
            "Process Group Ranks": str([*range(self.plan.ranks)]),
        }
        with self.span("operator", "record_param_comms", **arguments):
            jobs = self.launch(NCCL.format(kernel), 10, stream=COMMUNICATION)
        end = max(job.start_ns for job in jobs) + num_bytes // 100
        for machine, job in zip(self.machines, jobs, strict=True):
            job.end_ns = machine.free[self.device, COMMUNICATION] = end
            job.collective, job.num_bytes = of_torch, num_bytes
