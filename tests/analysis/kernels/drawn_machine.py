"""Hosts and devices that run a program to the nanosecond, and what a profiler keeps of that."""

import math
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from enum import IntEnum
from threading import Barrier
from typing import Any

from tests.analysis.kernels.drawn_plans import Pause, Plan

Thread = IntEnum("Thread", "MAIN AUTOGRAD LOADING")
Stream = IntEnum("Stream", {"COMPUTE": 7, "COPIES": 13, "SIDE": 17, "COMMUNICATION": 20})
MICROSECOND, MILLISECOND = 1_000, 1_000_000


@dataclass(eq=False, kw_only=True)
class Span:
    """What is open on a thread of the host: a range, an operator, a call or a Python frame."""

    kind: str
    name: str
    start_ns: int
    end_ns: int
    number: int
    operator: int = 0
    """The number of the innermost operator that is open; 0 for none."""
    means: str = ""
    args: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""
    """The kind, batch and tokens of a server's step."""
    phase: str = ""
    step: int = -1
    """The step of the optimizer or of the server; -1 outside of all."""
    micro: int = 0
    device: int = 0
    stream: int = Stream.COMPUTE
    thread: int = Thread.MAIN
    is_in_graph: bool = False


@dataclass(eq=False, kw_only=True)
class Job(Span):
    """A kernel or a copy, and the call that launched it."""

    launch: Span


class Machine:
    """One rank: a host that launches work, and devices whose streams run it in order."""

    def __init__(self, plan: Plan, rank: int, barrier: Barrier, ranks: list[Any]) -> None:
        self.plan, self.rank = plan, rank
        self.barrier, self.ranks = barrier, ranks
        self.random = random.Random(plan.seed)
        """What all ranks draw alike."""
        self.noise = random.Random(f"{plan.seed} {rank}")
        self.slowness = 1.6 if (plan.limit, plan.slow_rank) == ("ranks", rank) else 1.0
        self.pace_ns = 25 * MICROSECOND if plan.limit == "host" else 5 * MICROSECOND
        self.now, self.scale = 0, 1
        self.at: dict[str, Any] = {"device": 0}
        """Where in the program the next span stands, by fields of `Span`."""
        self.spans, self.jobs, self.lost = list[Span](), list[Job](), list[Job]()
        self.doing = list[Span]()
        """What the host did besides launching, the whole truth; named by a `Pause`."""
        self.free: defaultdict[tuple[int, int], int] = defaultdict(int)
        """When each stream of each device has done all its work."""

    @contextmanager
    def within(self, **changes: Any) -> Iterator[None]:
        before = self.at
        self.at = before | changes
        yield
        self.at = before

    def spend(self, duration_ns: int, kind: str, name: str, doing: str = "", **what: Any) -> Span:
        """Spend time in a span, or in none if it has no kind, and perhaps not with launching."""
        end_ns = self.now + duration_ns
        times = {"start_ns": self.now, "end_ns": end_ns, "number": len(self.spans) + 1}
        span = Span(kind=kind, name=name, **(self.at | times | what))
        self.now = end_ns
        if kind:
            self.spans.append(span)
        if doing:
            self.doing.append(replace(span, name=doing))
        return span

    @contextmanager
    def opened(self, kind: str, name: str, means: str = "", **what: Any) -> Iterator[None]:
        """Something that is open on the host, if it has a name and no graph has recorded it."""
        if not name or "is_in_graph" in self.at:
            yield
            return
        span = self.spend(200 + len(name), kind, name, means=means, **what)
        if kind == "operator":
            span.operator = span.number
        with self.within(operator=span.operator):
            yield
        self.now += 100
        span.end_ns = self.now

    @contextmanager
    def on_thread(self, thread: int) -> Iterator[None]:
        """Another thread, which the main one waits for if it does not load beside it."""
        begun_ns = self.now
        change_ns = 0 if "is_in_graph" in self.at else 3 * MICROSECOND
        self.now += change_ns
        with self.within(thread=thread):
            yield
        self.now = begun_ns if thread == Thread.LOADING else self.now + change_ns

    @contextmanager
    def graph(self, is_one: object) -> Iterator[None]:
        """What is launched as one graph, if it is."""
        if not is_one:
            yield
            return
        with self.within(is_in_graph=True):
            self.of_graph = self.spend(12 * MICROSECOND, "call", "cudaGraphLaunch")
            yield

    def pause(self, reason: str, duration_ns: int) -> None:
        kind = "call" if reason == Pause.ALLOCATION else ""
        self.spend(int(duration_ns * self.noise.uniform(0.9, 1.1)), kind, "cudaMalloc", reason)

    def wait(self, name: str) -> None:
        """A call that returns when the stream, or all of them, have come so far."""
        until = self.free[self.at["device"], Stream.COMPUTE]
        if name != "cudaStreamSynchronize":
            until = max(self.free.values())
        duration_ns = max(until - self.now, 0) + 2 * MICROSECOND
        self.spend(duration_ns, "call", name, Pause.WAITING)

    def join(self, stream: int, of_stream: int, of_device: int | None = None) -> None:
        """Let a stream wait for all work of another."""
        device = self.at["device"]
        other = device if of_device is None else of_device, of_stream
        self.free[device, stream] = max(self.free[device, stream], self.free[other])
        if "is_in_graph" not in self.at:
            self.spend(MICROSECOND, "call", "cudaStreamWaitEvent", stream=stream)

    def costs(self, kind: str, name: str, duration_ns: int) -> tuple[int, float, int]:
        """The time of a job, the share of the usual time to launch it, and the pause before it."""
        return duration_ns, 1.0, 700

    def launch(self, kind: str, name: str, duration_ns: int, stream: int, **what: Any) -> Job:
        duration_ns, rate, between_ns = self.costs(kind, name, duration_ns)
        place = self.at["device"], stream
        launch = self.of_graph if "is_in_graph" in self.at else self.launching(kind, name, rate)
        start_ns = max(self.free[place] + between_ns, launch.start_ns + 6 * MICROSECOND)
        end_ns = start_ns + int(duration_ns * self.slowness) + self.noise.randrange(1, 50)
        self.free[place] = end_ns
        what |= {"stream": stream, "launch": launch, "number": len(self.jobs) + 1}
        what |= {"start_ns": start_ns, "end_ns": end_ns}
        self.jobs.append(Job(kind=kind, name=name, **(self.at | what)))
        return self.jobs[-1]

    def launching(self, kind: str, name: str, rate: float) -> Span:
        """The call that launches, which waits while the queue of the device is full."""
        pace_ns = int(rate * self.pace_ns * self.noise.uniform(0.7, 1.4))
        share, depth = self.noise.uniform(0.3, 0.6), self.plan.queue
        self.now += int(pace_ns * (1 - share))
        oldest_ns = self.jobs[-depth].end_ns if len(self.jobs) >= depth else 0
        blocked_ns = max(oldest_ns - self.now, 0)
        call = "cudaLaunchKernel" if kind == "kernel" else "cudaMemcpyAsync"
        if name.startswith("triton_"):
            call = "cuLaunchKernelEx"  # Triton launches by the driver itself
        launch = self.spend(blocked_ns + int(pace_ns * share), "call", call)
        if blocked_ns:  # in no phase, as it is no call that waits
            self.doing.append(replace(launch, name=Pause.WAITING, phase=""))
        return launch

    def meet(self, job: Job, duration_ns: int) -> None:
        """End a collective on all ranks together: their clocks agree here."""
        self.barrier.wait()
        job.end_ns = max(machine.jobs[-1].start_ns for machine in self.ranks) + duration_ns
        self.free[job.device, job.stream] = job.end_ns
        self.barrier.wait()


def recorded(machine: Machine) -> Machine:
    """The rank with what the profiler keeps of it: events within the cut, but for lost ones."""
    plan, random_ = machine.plan, random.Random(machine.plan.seed)
    low, high = (math.ceil(part * machine.now) for part in plan.cut)

    def is_kept(event: Span) -> bool:
        is_lost = event.kind == plan.dropped and random_.random() < 0.1
        return low <= event.start_ns and event.end_ns <= high and not is_lost

    file = copy(machine)
    file.spans = [span for span in machine.spans if is_kept(span)]
    file.jobs, file.lost = [], []
    for job in machine.jobs:
        times = {"start_ns": job.start_ns + plan.shift_ns, "end_ns": job.end_ns + plan.shift_ns}
        (file.jobs if is_kept(job) else file.lost).append(replace(job, **times))
    file.jobs.sort(key=lambda job: (job.start_ns, job.device, job.stream))
    return file
