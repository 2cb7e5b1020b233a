"""What is true of a recorded program, and which events of its file show it."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from tests.analysis.kernels.drawn_machine import Job, Machine, Span, Stream, Thread
from tests.analysis.kernels.drawn_plans import TABLES, Part, Pause
from tests.analysis.kernels.drawn_programs import KERNELS

Interval = tuple[int, int]

MODULE = "nn.Module: "
LAUNCHING, QUEUED = "launch", "queued"
ADAM, _ = KERNELS["adam"]
_TURNS = (Part.PREFILL, Part.DECODE)
_COMPUTING = (Part.FORWARD, Part.LOSS, Part.BACKWARD)
_UPDATING = (Part.OPTIMIZER, Part.ZERO_GRAD, Part.CLOSURE)


def times(events: Iterable[Job | Span]) -> list[Interval]:
    return [(event.start_ns, event.end_ns) for event in events]


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


def alone(jobs: Iterable[Job], others: Iterable[Job]) -> int:
    """The time in which one of the jobs runs and none of the others."""
    beside = union(times(others))
    return length(union((*times(jobs), *beside))) - length(beside)


@dataclass(frozen=True)
class Gap:
    """A time without work of one device."""

    device: int
    start_ns: int
    end_ns: int
    is_at_edge: bool
    reasons: dict[str, int]
    """What the host did meanwhile, in ns: a `Pause`, `launch` or `queued`."""

    @property
    def length_ns(self) -> int:
        return self.end_ns - self.start_ns

    def holds(self, length_ns: int) -> bool:
        """Whether what is said to last so long may be this or, if allocations or batches divide it,
        a piece of it.
        """
        is_divided = self.time_of((Pause.DATA, Pause.ALLOCATION)) > 0
        rest = self.length_ns - length_ns
        return rest > -2_000 and (rest < 2_000 or is_divided)

    def time_of(self, reasons: Iterable[str]) -> int:
        return sum(self.reasons.get(reason, 0) for reason in reasons)


class Truth:
    """The truth about one file."""

    def __init__(self, recorded: Machine) -> None:
        self.recorded, self.plan, self.jobs = recorded, recorded.plan, recorded.jobs
        self.kernels = [job for job in self.jobs if job.kind == "kernel"]
        self.ranges = [span for span in recorded.spans if span.kind == "range"]
        self.kept = set(recorded.spans)
        self.is_listed = self.plan.style not in TABLES["unlisted"]
        self._opened: dict[Span, list[Span]] = {}

    # what is open where

    def around(self, job: Job) -> list[Span]:
        """What of the file was open on any thread at the launch, the outermost first; nothing if
        the launch is not in the file.
        """
        if job.launch not in self.kept:
            return []
        return self.opened_at(job.launch)

    def opened_at(self, event: Span) -> list[Span]:
        if event not in self._opened:
            now, spans = event.start_ns, self.recorded.spans
            opened = [span for span in spans if span.start_ns <= now < span.end_ns]
            self._opened[event] = opened
        return self._opened[event]

    def ranges_around(self, job: Job, *means: str) -> list[Span]:
        return [s for s in self.around(job) if s.kind == "range" and s.means in means]

    def launched_in(self, span: Span) -> list[Job]:
        """Kernels of the file whose launch is in the file and in the range."""
        return [job for job in self.kernels if span in self.around(job)]

    def innermost(self, kind: str, name: str, event: Span) -> Span | None:
        """The innermost span of the kind and with this beginning of its name on the thread."""
        around = [
            span
            for span in self.opened_at(event)
            if (span.kind, span.thread) == (kind, event.thread) and span.name.startswith(name)
        ]
        return max(around, key=lambda span: span.start_ns, default=None)

    # times

    @property
    def devices(self) -> range:
        return range(self.plan.devices)

    @cached_property
    def bounds(self) -> Interval:
        """From the first event of a device to the last."""
        return self.jobs[0].start_ns, max(job.end_ns for job in self.jobs)

    @cached_property
    def bounds_of_host(self) -> Interval:
        spans = self.recorded.spans
        return min((s.start_ns for s in spans), default=0), max(
            (s.end_ns for s in spans), default=0
        )

    @property
    def profiled_ns(self) -> int:
        return self.bounds[1] - self.bounds[0]

    @property
    def wall_ns(self) -> int:
        """From the first event of the file to the last."""
        both = (*self.bounds, *self.bounds_of_host)
        return max(both) - min(both)

    def busy(self, device: int) -> list[Interval]:
        return union(times(job for job in self.jobs if job.device == device))

    @cached_property
    def busy_ns(self) -> int:
        return sum(length(self.busy(device)) for device in self.devices)

    @property
    def busy_share(self) -> float:
        """The mean over the devices, between the first event of any and the last."""
        return self.busy_ns / self.plan.devices / self.profiled_ns

    @property
    def is_timed(self) -> bool:
        """Whether idle times can be explained from the file: clocks agree, and nothing is lost."""
        return not self.plan.shift_ns and self.plan.dropped not in ("kernel", "call")

    @cached_property
    def collectives(self) -> Interval:
        """Time in which collectives run, and the part in which nothing else does."""
        jobs = [job for job in self.jobs if job.stream == Stream.COMMUNICATION]
        others = [job for job in self.jobs if job.stream != Stream.COMMUNICATION]
        return length(union(times(jobs))), alone(jobs, others)

    @cached_property
    def copies_alone(self) -> int:
        return alone([job for job in self.jobs if job.kind == "copy"], self.kernels)

    # steps

    @cached_property
    def step_ranges(self) -> list[Span]:
        spans = [s for s in self.ranges if s.means in (Part.STEP, *_TURNS)]
        return sorted(spans, key=lambda span: span.start_ns)

    @cached_property
    def num_optimizers(self) -> int:
        """Ranges around calls of the optimizer, without those inside of others."""
        spans = [s for s in self.ranges if s.means in (Part.OPTIMIZER, Part.CLOSURE)]
        return len(union(times(spans)))

    def step_counts(self) -> tuple[set[int], bool]:
        """The numbers of steps that are right, and whether ranges of steps show them.

        A step at an edge of the file may be left out if the file lacks some of its kernels.
        """
        spans, updates = self.step_ranges, self.num_optimizers
        if spans:
            worked = [span for span in spans if self.launched_in(span)]
            cut = {span.start_ns for span in worked[:1] + worked[-1:] if self.lacks(span)}
            right = set(range(len(worked) - len(cut), len(spans) + 1))
            if self.plan.steps_of_micro or not self.is_listed:
                right |= {updates - 1, updates, updates + 1}
        elif updates:
            is_lacking = any(job.launch in self.kept for job in self.recorded.lost)
            right = set(range(updates - 1 - 2 * is_lacking, updates + 2))
        else:
            right = self._counted(by_micro=False)
        is_told = bool(spans or updates) or any(job.name == ADAM for job in self.jobs)
        if not self.is_listed or not is_told:
            right |= self._passes()  # nothing known tells passes from steps
        return right, bool(spans)

    def lacks(self, span: Span) -> bool:
        """Whether kernels that were launched in the range are not in the file."""
        return any(span in self.around(job) for job in self.recorded.lost)

    def _counted(self, *, by_micro: bool) -> set[int]:
        """How many steps or micro-batches a reader may see: the first, the last and those that
        lack something may be left out.
        """

        def numbers(jobs: Iterable[Job]) -> set[Interval]:
            return {(job.step, job.micro * by_micro) for job in jobs if job.step >= 0}

        unlaunched = [job for job in self.jobs if job.launch not in self.kept]
        seen = numbers(self.jobs)
        whole = seen - numbers([*self.recorded.lost, *unlaunched])
        return set(range(max(len(whole) - 1, 0), len(seen) + 2))

    def _passes(self) -> set[int]:
        """The numbers of micro-batches that are right."""
        ranges = sum(span.means == Part.FORWARD for span in self.ranges)
        return {ranges} | self._counted(by_micro=True)

    def count_of_kind(self, kind: str) -> set[int]:
        """How many steps of the kind are in the file, where those at edges may be left out."""
        plan = self.plan
        if kind in _TURNS:
            spans = [span for span in self.step_ranges if span.means == kind]
            worked = [span for span in spans if self.launched_in(span)]
            return set(range(len(worked) - sum(map(self.lacks, spans)), len(spans) + 1))
        if kind == "with the optimizer":
            updates = {job.step for job in self.jobs if job.phase == Part.OPTIMIZER}
            return set(range(len(updates) - 2, len(updates) + 2))
        if kind == "forward only":
            return {1, 2} if plan.evaluates or plan.kind == "inference" else set()
        # a step that the file cuts before its optimizer is none without an optimizer
        is_hidden = plan.optimizer in ("", "plain") or plan.dropped in ("range", "call", "kernel")
        passes = {(job.step, job.micro) for job in self.jobs if job.step >= 0}
        return set(range(1, len(passes) + 1)) if plan.steps_of_micro or is_hidden else set()

    # phases, modules and operators of kernels

    def phases_of(self, job: Job) -> set[str]:
        """The phases that may be said of a kernel."""
        phase = job.phase
        right = {phase}
        if phase in (Part.FORWARD, Part.LOSS, Part.EVALUATION):
            right = {Part.FORWARD, Part.LOSS}
        elif phase == Part.WEIGHTS:
            right = {Part.BACKWARD, "weight gradients"}
        elif phase in (Part.ZERO_GRAD, Part.CLIP):
            right = {Part.OPTIMIZER} if self.ranges_around(job, *_UPDATING) else right
        if job.launch.thread == Thread.LOADING:  # the main thread's phase, by when it was launched
            right |= {span.means for span in self.ranges_around(job, *_COMPUTING)}
            right |= {Part.OPTIMIZER} if self.ranges_around(job, *_UPDATING) else set()
        return right

    def evidence(self, job: Job) -> str:
        """What the file has of the kernel's phase: `shown`, `hinted` or nothing."""
        phase, is_in_graph = job.phase, job.is_in_graph
        if phase == Part.OPTIMIZER and job.name == ADAM:
            return "shown"
        around = self.around(job)
        if not phase or not around:
            return ""
        is_forward = phase in (Part.FORWARD, Part.LOSS, Part.EVALUATION)
        names = (Part.FORWARD, phase) if is_forward else (phase,)
        if self.ranges_around(job, *names) and (not is_in_graph or self.plan.graph == "parts"):
            return "shown" if self.is_listed else "hinted"
        if self.plan.style in ("vllm", "sglang", "deepseek") and self.ranges_around(
            job, *_TURNS, phase
        ):
            return "shown"
        is_node = any(s.kind == "operator" and s.means == Part.BACKWARD for s in around)
        if phase == Part.BACKWARD and (is_node or job.launch.thread == Thread.AUTOGRAD):
            return "shown" if is_node else "hinted"
        is_hinted = self.plan.kind != "training" or (self.has_backward and not is_in_graph)
        return "hinted" if is_forward and is_hinted else ""

    @cached_property
    def has_backward(self) -> bool:
        """Whether something in the file shows a backward pass."""
        return any(
            job.launch.thread == Thread.AUTOGRAD and self.around(job) for job in self.kernels
        )

    def module_of(self, job: Job) -> str:
        """The innermost module whose frame of Python was open at the launch, or, for a node of
        backward, at its operator of forward; empty for none.
        """
        if self.plan.is_nsys or not self.around(job) or job.is_in_graph:
            return ""
        module = self.innermost("frame", MODULE, job.launch)
        node = self.innermost("operator", "autograd::", job.launch)
        if node is not None and (module is None or module.start_ns < node.start_ns):
            number = node.args.get("Sequence number", -1)
            for span in self.recorded.spans:
                is_forward = span.thread == Thread.MAIN and span.kind == "operator"
                if is_forward and span.args.get("Sequence number") == number:
                    module = self.innermost("frame", MODULE, span)
        return "" if module is None else module.name

    def operator_of(self, job: Job) -> str:
        """The innermost operator around the launch; empty for none."""
        if not self.around(job) or job.is_in_graph:
            return ""
        operator = self.innermost("operator", "", job.launch)
        return "" if operator is None else operator.name

    # idle times

    @cached_property
    def gaps(self) -> list[Gap]:
        """Times without work between the jobs of a device, before its first one and after its last:
        since and until the program begins and ends if the file has that, else any device works.
        """
        first, last = self.bounds
        if self.plan.cut[0] == 0:
            first = self.bounds_of_host[0]
        if self.plan.cut[1] == 1:
            last = self.bounds_of_host[1]
        gaps = []
        for device in self.devices:
            next_of = {j.start_ns: j for j in reversed(self.jobs) if j.device == device}
            busy = self.busy(device)
            between = [(start, end, False) for (_, start), (end, _) in pairwise(busy)]
            if busy:
                between += [(first, busy[0][0], True), (busy[-1][1], last, True)]
            for start, end, is_at_edge in between:
                job = next_of.get(end)
                launched = end if job is None else job.launch.end_ns
                if start < end:
                    reasons = self._reasons(start, end, launched)
                    gaps.append(Gap(device, start, end, is_at_edge, reasons))
        return gaps

    def _reasons(self, start: int, end: int, launched: int) -> dict[str, int]:
        launched = min(max(launched, start), end)
        reasons = Counter({QUEUED: end - launched})
        for doing in self.recorded.doing:
            reason = Pause.PREPARING if self._is_unseen(doing) else doing.name
            reasons[reason] += overlap((doing.start_ns, doing.end_ns), (start, launched))
        reasons[LAUNCHING] = max(end - start - reasons.total(), 0)
        return dict(+reasons)

    def _is_unseen(self, doing: Span) -> bool:
        """Whether this is a short wait for data in no range of the file, so a time in which
        something was prepared.
        """
        if doing.name != Pause.DATA or self.plan.limit == "data":
            return False
        loaders = [span for span in self.ranges if span.means in (Part.DATA, Pause.RANGE)]
        return not any(span.start_ns <= doing.start_ns < span.end_ns for span in loaders)

    @property
    def gaps_between(self) -> list[Gap]:
        return [gap for gap in self.gaps if not gap.is_at_edge]

    def idle_at_most(self, *reasons: str) -> int:
        """The longest time that idle times for one of the reasons can be said to take."""
        limit = 0
        for gap in self.gaps:
            part = gap.time_of(reasons)
            is_main = part >= 0.3 * gap.length_ns or (Pause.WAITING in reasons and part)
            limit += gap.length_ns if is_main else part
        return limit

    def longest_idle(self) -> int:
        """The longest idle time of any device, also at the edges: a step may begin before them."""
        first, last = self.bounds
        edges = [self.bounds_of_host[1] - last, first - self.bounds_of_host[0]]
        return max(edges + [gap.length_ns for gap in self.gaps])

    def idle_ns(self, reason: str) -> int:
        return sum(gap.time_of([reason]) for gap in self.gaps_between)

    def phases_after_gaps(self, least_ns: int) -> set[str]:
        """The phases of the jobs and of the next kernels that end idle times."""
        phases = set()
        for gap in self.gaps:
            jobs = [job for job in self.jobs if job.device == gap.device]
            after = [job for job in jobs if job.start_ns >= gap.end_ns]
            kernels = [job for job in after if job.kind == "kernel"]
            if gap.length_ns >= least_ns:
                for job in after[:1] + kernels[:1]:
                    # what another thread launches is in the main thread's phase too
                    phases |= self.phases_of(job) if job.launch.thread == Thread.LOADING else set()
                    phases.add(job.phase)
        return phases

    def is_open(self, name: str, gap: Gap, length_ns: int) -> bool:
        """Whether a range or frame of this name was open for a part of so much of the idle time."""
        bounds = gap.start_ns, gap.end_ns
        spans = [span for span in self.written if span.name == name]
        return sum(overlap(part, bounds) for part in times(spans)) > 0.3 * length_ns

    @property
    def written(self) -> list[Span]:
        """What of the host the file has: reports of nsys have no operators and frames."""
        kinds = ("range", "call") if self.plan.is_nsys else ("range", "call", "operator", "frame")
        return [span for span in self.recorded.spans if span.kind in kinds]
