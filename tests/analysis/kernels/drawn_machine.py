"""Hosts and devices that run a program to the nanosecond, and what a profiler keeps of that.

Each rank is a `Machine` that runs the same acts in its own time; ranks meet in collectives.
"""

import math
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

from tests.analysis.kernels.drawn_plans import Pause, Plan
from tests.analysis.kernels.drawn_programs import MICROSECOND, Act, Writer


@dataclass(eq=False)
class Span:
    """What is open on a thread of the host: a range, an operator, a call or a Python frame."""

    kind: str
    name: str
    start_ns: int
    end_ns: int
    act: Act


@dataclass(eq=False)
class Job(Span):
    """A kernel or a copy, and the call that launched it."""

    launch: Span


class Machine:
    """One rank: a host that launches work, and devices whose streams run it in order."""

    def __init__(self, plan: Plan, rank: int = 0) -> None:
        self.plan, self.random = plan, random.Random(f"{plan.seed} {rank}")
        self.slowness = 1.6 if (plan.limit, plan.slow_rank) == ("ranks", rank) else 1.0
        self.pace_ns = 25 * MICROSECOND if plan.limit == "host" else 5 * MICROSECOND
        self.now = self.begun_ns = 0
        self.spans, self.opened = list[Span](), list[Span]()
        self.doing = list[Span]()
        """What the host did besides launching, the whole truth; named by a `Pause`."""
        self.jobs = list[Job]()
        self.free: defaultdict[tuple[int, int], int] = defaultdict(int)

    def spend(self, kind: str, name: str, duration_ns: int, act: Act, what: str = "") -> Span:
        """Spend time in a span, or in none if it has no kind, and perhaps not with launching."""
        span = Span(kind, name, self.now, self.now + duration_ns, act)
        self.now = span.end_ns
        if kind:
            self.spans.append(span)
        if what:
            self.doing.append(replace(span, name=what))
        return span

    def open(self, act: Act) -> None:
        if act.kind == "thread":
            self.begun_ns = self.now
            self.now += 3 * MICROSECOND
        elif act.kind == "graph":
            self.graph = self.spend("call", "cudaGraphLaunch", 12 * MICROSECOND, act)
        else:
            self.opened.append(self.spend(act.kind, act.name, 200 + len(act.name), act))

    def close(self, act: Act) -> None:
        if act.kind == "thread":
            self.now = self.begun_ns if act.name == "beside" else self.now + 3 * MICROSECOND
        elif act.kind != "graph":
            self.now += 100
            self.opened.pop().end_ns = self.now

    def pause(self, act: Act) -> None:
        kind = "call" if act.means == Pause.ALLOCATION else ""
        duration = int(act.duration_ns * self.random.uniform(0.9, 1.1))
        self.spend(kind, "cudaMalloc", duration, act, act.means)

    def wait(self, act: Act) -> None:
        """A call that returns when the stream, or all of them, have come so far."""
        until = self.free[act.device, act.stream] if act.stream >= 0 else max(self.free.values())
        duration = max(until - self.now, 0) + 2 * MICROSECOND
        self.spend("call", act.name, duration, act, Pause.WAITING)

    def join(self, act: Act) -> None:
        """Let a stream wait for all work of another."""
        of_device = act.device if act.of_device is None else act.of_device
        stream, other = (act.device, act.stream), (of_device, act.of_stream)
        self.free[stream] = max(self.free[stream], self.free[other])
        if not act.is_in_graph:
            self.spend("call", "cudaStreamWaitEvent", MICROSECOND, act)

    def costs(self, act: Act) -> tuple[int, float, int]:
        """How long a kernel or copy runs, which part of the usual time the host needs to launch
        it, and how long its stream pauses before it.
        """
        return act.duration_ns, 1.0, 700

    def launch(self, act: Act) -> None:
        duration, rate, between = self.costs(act)
        launch = self.graph if act.is_in_graph else self.launching(act, rate)
        stream = act.device, act.stream
        start = max(self.free[stream] + between, launch.start_ns + 6 * MICROSECOND)
        end = start + int(duration * self.slowness) + self.random.randrange(1, 50)
        self.free[stream] = end
        self.jobs.append(Job(act.kind, act.name, start, end, act, launch))

    def launching(self, act: Act, rate: float) -> Span:
        """The call that launches, which waits while the queue of the device is full."""
        pace = int(rate * self.pace_ns * self.random.uniform(0.7, 1.4))
        share, depth = self.random.uniform(0.3, 0.6), self.plan.queue
        self.now += int(pace * (1 - share))
        oldest = self.jobs[-depth].end_ns if len(self.jobs) >= depth else 0
        blocked = max(oldest - self.now, 0)
        name = "cudaLaunchKernel" if act.kind == "kernel" else "cudaMemcpyAsync"
        if act.name.startswith("triton_"):
            name = "cuLaunchKernelEx"  # Triton launches by the driver itself
        call = self.spend("call", name, blocked + int(pace * share), act)
        if blocked:  # in no phase, as it is no call that waits
            self.doing.append(replace(call, name=Pause.WAITING, act=act._replace(phase="")))
        return call


def simulate(plan: Plan, kind: Callable[[Plan, int], Machine] = Machine) -> list[Machine]:
    """Run the whole program on a machine for each rank."""
    machines = [kind(plan, rank) for rank in range(plan.ranks)]
    for act in Writer(plan).acts:
        for machine in machines:
            getattr(machine, act.verb)(act)
        if "Group size" in act.args and act.verb == "launch":
            # a collective ends on all ranks together: their clocks agree here
            start = max(machine.jobs[-1].start_ns for machine in machines)
            for machine in machines:
                end = start + act.args["In msg nelems"] // 50
                machine.jobs[-1].end_ns = machine.free[act.device, act.stream] = end
    return machines


@dataclass(frozen=True)
class Recorded:
    """What the file of one rank holds, and what it lacks."""

    plan: Plan
    rank: int
    spans: list[Span]
    jobs: list[Job]
    lost: list[Job]
    doing: list[Span]


def recorded(machine: Machine, rank: int = 0) -> Recorded:
    """What the profiler keeps of the rank: events that lie within the cut, but for lost ones."""
    plan, random_ = machine.plan, random.Random(machine.plan.seed)
    low, high = (math.ceil(part * machine.now) for part in plan.cut)

    def is_kept(event: Span) -> bool:
        is_lost = event.kind == plan.dropped and random_.random() < 0.1
        return low <= event.start_ns and event.end_ns <= high and not is_lost

    spans = [span for span in machine.spans if is_kept(span)]
    jobs, lost = list[Job](), list[Job]()
    for job in machine.jobs:
        start, end = job.start_ns + plan.shift_ns, job.end_ns + plan.shift_ns
        kept = jobs if is_kept(job) else lost
        kept.append(replace(job, start_ns=start, end_ns=end))
    jobs.sort(key=lambda job: (job.start_ns, job.act.device, job.act.stream))
    return Recorded(plan, rank, spans, jobs, lost, machine.doing)
