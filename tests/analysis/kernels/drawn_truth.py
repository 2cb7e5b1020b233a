"""What is true of a recorded program, and which events of its file show it."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from tests.analysis.kernels.drawn_machine import Job, Span
from tests.analysis.kernels.drawn_plans import AUTOGRAD, COMMUNICATION, LOADING, MAIN, Part, Pause
from tests.analysis.kernels.drawn_programs import ADAM, Recorded

Interval = tuple[int, int]

STEPS_OF_RANGES = (Part.STEP, Part.PREFILL, Part.DECODE)
MODULE = "nn.Module: "
UNLISTED = ("iteration", "deepspeed", "short", "words")
"""Styles whose names a reader need not know."""
LAUNCHING, QUEUED = "launch", "queued"


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The intervals that do not overlap and cover the same time."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> int:
    return sum(end - start for start, end in intervals)


def overlap(one: Interval, other: Interval) -> int:
    return max(min(one[1], other[1]) - max(one[0], other[0]), 0)


def times(jobs: Iterable[Job]) -> list[Interval]:
    return [(job.start_ns, job.end_ns) for job in jobs]


@dataclass(frozen=True)
class Gap:
    """A time without work of one device, between two jobs."""

    start_ns: int
    end_ns: int
    reasons: dict[str, int]
    """What the host did meanwhile, in ns: as in `Machine.doing`, `launch` or `queued`."""

    @property
    def length_ns(self) -> int:
        return self.end_ns - self.start_ns


class Truth:
    """The truth about one file."""

    def __init__(self, recorded: Recorded) -> None:
        self.recorded, self.plan = recorded, recorded.plan
        self.jobs = recorded.jobs
        self.kernels = [job for job in self.jobs if job.kind == "kernel"]
        self.kept = set(map(id, recorded.spans))
        self.ranges = [span for span in recorded.spans if span.kind == "range"]
        self.nodes = [
            s for s in recorded.spans if s.kind == "operator" and s.means == Part.BACKWARD
        ]
        self._gaps: dict[int, tuple[list[Gap], list[Gap]]] = {}
        self.is_listed = self.plan.style not in UNLISTED

    # sums

    @property
    def kernel_ns(self) -> int:
        return length(times(self.kernels))

    def busy(self, device: int = 0) -> list[Interval]:
        return union(times(job for job in self.jobs if job.device == device))

    @property
    def bounds(self) -> Interval:
        """From the first event of a device to the last."""
        return min(job.start_ns for job in self.jobs), max(job.end_ns for job in self.jobs)

    # steps

    @property
    def step_ranges(self) -> list[Span]:
        spans = [span for span in self.ranges if span.means in STEPS_OF_RANGES]
        return sorted(spans, key=lambda span: span.start_ns)

    @property
    def optimizers(self) -> list[Span]:
        """Ranges around calls of the optimizer, without those inside of others."""
        outermost: list[Span] = []
        spans = [span for span in self.ranges if span.means in (Part.OPTIMIZER, Part.CLOSURE)]
        for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns)):
            if not outermost or span.start_ns >= outermost[-1].end_ns:
                outermost.append(span)
        return outermost

    def launched_in(self, span: Span) -> list[Job]:
        """Kernels of the file whose launch is in the file and in the range."""
        return [
            job
            for job in self.kernels
            if id(job.launch) in self.kept and span.start_ns <= job.launch.start_ns < span.end_ns
        ]

    def step_counts(self) -> tuple[set[int], bool]:
        """The numbers of steps that are right, and whether ranges of steps show them.

        A step at an edge of the file may be left out if the file lacks some of its kernels.
        """
        spans, optimizers = self.step_ranges, len(self.optimizers)
        around_optimizers = {optimizers - 1, optimizers, optimizers + 1}
        if spans:
            worked = [span for span in spans if self.launched_in(span)]
            ends = dict.fromkeys(map(id, worked[:1] + worked[-1:]))
            cut = sum(id(span) in ends and self._lacks_kernels(span) for span in worked)
            right = set(range(len(worked) - cut, len(spans) + 1))
            if self.plan.steps_of_micro or not self.is_listed:
                right |= around_optimizers
            if not self.is_listed:
                right |= self._passes()
            return right, True
        if optimizers:
            lacking = 2 if self._launched_and_lost() else 0
            return set(range(optimizers - 1 - lacking, optimizers + 2)), False
        right = self._counted(self.recorded.jobs, self._incomplete, by_micro=False)
        if not any(job.name == ADAM for job in self.jobs):
            right |= self._passes()  # nothing tells passes from steps
        return right, False

    def _launched_and_lost(self) -> list[Job]:
        return [job for job in self.recorded.lost if id(job.launch) in self.kept]

    def _lacks_kernels(self, span: Span) -> bool:
        lost = self._launched_and_lost()
        return any(span.start_ns <= job.launch.start_ns < span.end_ns for job in lost)

    @property
    def _incomplete(self) -> list[Job]:
        """Jobs that are not in the file, or without their launch."""
        return [*self.recorded.lost, *(j for j in self.jobs if id(j.launch) not in self.kept)]

    def _counted(self, jobs: list[Job], incomplete: list[Job], *, by_micro: bool) -> set[int]:
        """How many steps or micro-batches a reader may see: the first, the last and those that
        lack something may be left out.
        """

        def numbers(jobs: Iterable[Job]) -> set[tuple[int, int]]:
            return {(job.step, job.micro if by_micro else 0) for job in jobs if job.step >= 0}

        whole = numbers(jobs) - numbers(incomplete)
        return set(range(max(len(whole) - 1, 0), len(numbers(jobs)) + 2))

    def _passes(self) -> set[int]:
        """The numbers of micro-batches that are right."""
        ranges = sum(span.means == Part.FORWARD for span in self.ranges)
        return {ranges} | self._counted(self.jobs, self._incomplete, by_micro=True)

    # phases

    def phase_of(self, job: Job) -> tuple[set[str], str]:
        """The phases that may be said of a kernel, and what shows them: `shown`, `hinted` or
        nothing.
        """
        right = {job.phase}
        if job.phase in (Part.FORWARD, Part.LOSS, Part.EVALUATION):
            right = {Part.FORWARD, Part.LOSS}
        elif job.phase == Part.WEIGHTS:
            right = {Part.BACKWARD, Part.WEIGHTS}
        elif job.phase in (Part.ZERO_GRAD, Part.CLIP) and self._is_inside(
            job, Part.OPTIMIZER, Part.ZERO_GRAD, Part.CLOSURE
        ):
            right = {Part.OPTIMIZER}
        if job.launch.thread == LOADING:  # the main thread's phase, by when it was launched
            parts = (Part.FORWARD, Part.LOSS, Part.BACKWARD, Part.OPTIMIZER)
            right |= {part for part in parts if self._around(job, part)}
        return right, self._evidence(job)

    def _is_inside(self, job: Job, *means: str) -> bool:
        return any(self._around(job, mean) for mean in means)

    def _around(self, job: Job, means: str) -> list[Span]:
        if id(job.launch) not in self.kept:
            return []
        now = job.launch.start_ns
        return [
            span
            for span in self.ranges
            if span.means == means and span.start_ns <= now < span.end_ns
        ]

    def _evidence(self, job: Job) -> str:
        if job.phase == Part.OPTIMIZER and job.name == ADAM:
            return "shown"
        if not job.phase or id(job.launch) not in self.kept:
            return ""
        phase = {Part.EVALUATION: Part.FORWARD}.get(job.phase, job.phase)
        is_named = self._around(job, Part.FORWARD if phase == Part.LOSS else phase)
        is_named = is_named or self._around(job, phase)
        if is_named and (not job.is_in_graph or self.plan.graph == "parts"):
            return "shown" if self.is_listed else "hinted"
        if self.plan.style in ("vllm", "sglang", "deepseek") and self._in_server(job):
            return "shown"
        now = job.launch.start_ns
        if phase == Part.BACKWARD and any(s.start_ns <= now < s.end_ns for s in self.nodes):
            return "shown"
        if phase == Part.BACKWARD and job.launch.thread == AUTOGRAD:
            return "hinted"
        if phase in (Part.FORWARD, Part.LOSS) and not job.is_in_graph:
            return "hinted" if self.has_backward or self.plan.kind != "training" else ""
        if phase in (Part.FORWARD, Part.LOSS) and self.plan.kind in ("inference", "server"):
            return "hinted"
        return ""

    def _in_server(self, job: Job) -> bool:
        now = job.launch.start_ns
        return any(span.start_ns <= now < span.end_ns for span in self.ranges)

    @property
    def has_backward(self) -> bool:
        """Whether something in the file shows a backward pass."""
        return any(
            id(job.launch) in self.kept and job.launch.thread == AUTOGRAD for job in self.kernels
        )

    # modules

    def module_of(self, job: Job) -> str:
        """The innermost module whose frame of Python was open at the launch, or, for a node of
        backward, at its operator of forward; empty for none.
        """
        if self.plan.is_nsys or id(job.launch) not in self.kept or job.is_in_graph:
            return ""
        module = self._innermost("frame", MODULE, job.launch)
        node = self._innermost("operator", "autograd::", job.launch)
        if node is not None and (module is None or module.start_ns < node.start_ns):
            number = node.args.get("Sequence number", -1)
            for span in self.recorded.spans:
                is_forward = span.thread == MAIN and span.kind == "operator"
                if is_forward and span.args.get("Sequence number") == number:
                    module = self._innermost("frame", MODULE, span)
        return "" if module is None else module.name

    def operator_of(self, job: Job) -> str:
        """The innermost operator around the launch; empty for none."""
        if self.plan.is_nsys or id(job.launch) not in self.kept or job.is_in_graph:
            return ""
        operator = self._innermost("operator", "", job.launch)
        return "" if operator is None else operator.name

    def _innermost(self, kind: str, name: str, at: Span) -> Span | None:
        """The innermost span of the kind and with this beginning of its name on the thread."""
        around = [
            span
            for span in self.recorded.spans
            if span.kind == kind
            and span.name.startswith(name)
            and span.thread == at.thread
            and span.start_ns <= at.start_ns < span.end_ns
        ]
        return max(around, key=lambda span: span.start_ns) if around else None

    # idle times

    def gaps(self, device: int = 0, *, edges: bool = False) -> list[Gap]:
        """Times without work between the jobs of a device; with `edges`, also those before its
        first job, if the file begins with the program, and after its last, if it ends with it.
        """
        if device not in self._gaps:
            self._gaps[device] = self._gaps_between(device), self._gaps_at_edges(device)
        between, at_edges = self._gaps[device]
        return between + at_edges if edges else between

    def _gaps_between(self, device: int) -> list[Gap]:
        next_of = {job.start_ns: job for job in reversed(self.jobs) if job.device == device}
        return [
            Gap(start, end, self._reasons(start, end, next_of[end].launch.end_ns))
            for (_, start), (end, _) in pairwise(self.busy(device))
        ]

    def _gaps_at_edges(self, device: int) -> list[Gap]:
        jobs = [job for job in self.jobs if job.device == device]
        if not jobs:
            return []
        gaps = []
        start, end = self.bounds_of_host
        first, last = jobs[0], max(job.end_ns for job in jobs)
        if self.plan.cut[0] == 0 and start < first.start_ns:
            reasons = self._reasons(start, first.start_ns, first.launch.end_ns)
            gaps.append(Gap(start, first.start_ns, reasons))
        if self.plan.cut[1] == 1 and last < end:
            gaps.append(Gap(last, end, self._reasons(last, end, end)))
        return gaps

    @property
    def bounds_of_host(self) -> Interval:
        spans = self.recorded.spans
        start = min((span.start_ns for span in spans), default=0)
        return start, max((span.end_ns for span in spans), default=0)

    def _reasons(self, start: int, end: int, launched: int) -> dict[str, int]:
        launched = min(max(launched, start), end)
        reasons: defaultdict[str, int] = defaultdict(int)
        if launched < end:
            reasons[QUEUED] = end - launched
        rest = launched - start
        for doing in self.recorded.doing:
            if part := overlap((doing.start_ns, doing.end_ns), (start, launched)):
                reasons[doing.what] += part
                rest -= part
        if rest > 0:
            reasons[LAUNCHING] = rest
        return dict(reasons)

    def all_gaps(self) -> list[Gap]:
        devices = range(self.plan.devices)
        return [gap for device in devices for gap in self.gaps(device, edges=True)]

    def is_open(self, name: str, gap: Gap) -> bool:
        """Whether a range or frame of this name was open for a part of the idle time."""
        bounds = gap.start_ns, gap.end_ns
        parts = [
            overlap((span.start_ns, span.end_ns), bounds)
            for span in self.written
            if span.name == name
        ]
        return sum(parts) > 0.3 * gap.length_ns

    @property
    def written(self) -> list[Span]:
        """What of the host the file has: reports of nsys have no operators and frames."""
        kinds = ("range", "call") if self.plan.is_nsys else ("range", "call", "operator", "frame")
        return [span for span in self.recorded.spans if span.kind in kinds]

    def idle_at_most(self, *reasons: str) -> int:
        """The longest time that idle times for one of the reasons can be said to take."""
        limit = 0
        for device in range(self.plan.devices):
            for gap in self.gaps(device, edges=True):
                part = sum(gap.reasons.get(reason, 0) for reason in reasons)
                is_main = part >= 0.3 * gap.length_ns or (Pause.WAITING in reasons and part)
                limit += gap.length_ns if is_main else part
        return limit

    def longest_idle(self) -> int:
        """The longest idle time of any device, also at the edges: a step may begin before them."""
        lengths = [self.bounds_of_host[1] - self.bounds[1], self.bounds[0] - self.bounds_of_host[0]]
        for device in range(self.plan.devices):
            lengths += [gap.length_ns for gap in self.gaps(device, edges=True)]
            for busy in self.busy(device)[:1]:
                lengths.append(busy[0] - self.bounds[0])
            for busy in self.busy(device)[-1:]:
                lengths.append(self.bounds[1] - busy[1])
        return max(lengths)

    def idle_ns(self, *reasons: str) -> int:
        gaps = self.gaps()
        return sum(gap.reasons.get(reason, 0) for gap in gaps for reason in reasons)

    def phases_doing(self, *what: Pause) -> set[str]:
        """The phases in which the host did one of these."""
        return {doing.phase for doing in self.recorded.doing if doing.what in what}

    def phases_after_gaps(self, least_ns: int) -> set[str]:
        """The phases of the jobs and of the next kernels that end idle times."""
        phases = set()
        for device in range(self.plan.devices):
            jobs = [job for job in self.jobs if job.device == device]
            for gap in self.gaps(device, edges=True):
                after = [job for job in jobs if job.start_ns >= gap.end_ns]
                kernels = [job for job in after if job.kind == "kernel"]
                if gap.length_ns >= least_ns:
                    for job in after[:1] + kernels[:1]:
                        # what another thread launches is in the main thread's phase too
                        phases |= self.phase_of(job)[0] if job.launch.thread == LOADING else set()
                        phases.add(job.phase)
        return phases

    def count_of_kind(self, kind: str) -> set[int]:
        """How many steps of the kind are in the file, where those at edges may be left out."""
        if kind in (Part.PREFILL, Part.DECODE):
            spans = [span for span in self.step_ranges if span.means == kind]
            lacking = sum(self._lacks_kernels(span) for span in spans)
            worked = sum(bool(self.launched_in(span)) for span in spans)
            return set(range(worked - lacking, len(spans) + 1))
        plan = self.plan
        updates = {job.step for job in self.jobs if job.phase == Part.OPTIMIZER}
        passes = {(job.step, job.micro) for job in self.jobs if job.step >= 0}
        if kind == "with the optimizer":
            return set(range(len(updates) - 2, len(updates) + 2))
        if kind == "forward only":
            return {1, 2} if plan.evaluates or plan.kind == "inference" else set()
        # a step that the file cuts before its optimizer is none without an optimizer
        hides_some = plan.dropped in ("ranges", "launches", "kernels")
        if plan.steps_of_micro or plan.optimizer in ("", "plain") or hides_some:
            return set(range(1, len(passes) + 1))
        return set()

    @property
    def is_timed(self) -> bool:
        """Whether idle times can be explained from the file: clocks agree, and nothing is lost."""
        return not self.plan.shift_ns and self.plan.dropped not in ("kernels", "launches")

    # communication

    def collectives(self) -> tuple[int, int]:
        """Time in which collectives run, and the part in which nothing else does."""
        is_collective = [job.stream == COMMUNICATION for job in self.jobs]
        pairs = list(zip(self.jobs, is_collective, strict=True))
        total = union(times(job for job, is_one in pairs if is_one))
        other = union(times(job for job, is_one in pairs if not is_one))
        both = union((*total, *other))
        return length(total), length(both) - length(other)

    def copies_alone(self) -> int:
        copies = times(job for job in self.jobs if job.kind != "kernel")
        kernels = union(times(self.kernels))
        return length(union((*copies, *kernels))) - length(kernels)
