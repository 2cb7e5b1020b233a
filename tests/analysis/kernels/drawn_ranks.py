"""What is true of the collectives of all ranks of a drawn program, and what is said of them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

from cs336.analysis.kernels.step_profile import StepProfile
from tests.analysis.kernels.drawn_machine import COLLECTIVES
from tests.analysis.kernels.drawn_programs import Recorded
from tests.analysis.kernels.drawn_truth import Truth
from tests.analysis.kernels.tracing import ns

_NAME_OF = {of_torch: name for name, (_, of_torch) in COLLECTIVES.items()}


@dataclass
class Meetings:
    """The collectives of all ranks, to the nanosecond and the byte."""

    waited_ns: list[int]
    """How long each rank waits for the last in all collectives."""
    last: list[int]
    """How many collectives each rank begins last, alone."""
    spread_ns: list[int] = field(default_factory=list)
    """The time from the first start to the last, of each collective."""
    sent_ns: Counter[str] = field(default_factory=Counter)
    """The time from the last start to the end, of each kind, added up over ranks."""
    num_bytes: Counter[str] = field(default_factory=Counter)


def meetings(files: Sequence[Recorded]) -> Meetings:
    """The collectives of the ranks, which all run the same ones and end them together."""
    rows = []
    for file in files:
        of_file = [job for job in file.jobs if job.collective]
        rows.append(sorted(of_file, key=lambda job: job.start_ns))
    true = Meetings([0] * len(files), [0] * len(files))
    for jobs in zip(*rows, strict=True):
        starts = [job.start_ns for job in jobs]
        last = max(starts)
        true.spread_ns.append(last - min(starts))
        if starts.count(last) == 1:
            true.last[starts.index(last)] += 1
        for rank, job in enumerate(jobs):
            true.waited_ns[rank] += last - job.start_ns
            true.sent_ns[_NAME_OF[job.collective]] += job.end_ns - last
            true.num_bytes[_NAME_OF[job.collective]] += job.num_bytes
    return true


def rank_claims(
    profile: StepProfile, files: Sequence[Recorded]
) -> Iterator[tuple[str, object, object]]:
    """What is compared, what is said and what is true; None is said for what is not seen."""
    true = meetings(files)
    waited, last = [], []
    for times in profile.ranks:
        waited.append(sum(map(ns, times.waited_s)) if times.waited_s is not None else None)
        last.append(sum(times.last) if times.last is not None else None)
    is_seen = bool(waited) and None not in waited
    yield "waits", waited if is_seen else None, true.waited_ns
    yield "which rank is last", last if is_seen else None, true.last
    largest = max((ns(skew.largest_s) for skew in profile.skew), default=None)
    yield "largest skew", largest, max(true.spread_ns, default=None)
    if len(profile.skew) == 1:
        said = profile.skew[0].median_s * 1e9
        yield "median skew", round(said, 1), float(median(true.spread_ns))
    exposed = sum(Truth(file).collectives()[1] for file in files)
    yield "exposed", sum(ns(group.exposed_s) for group in profile.groups) or None, exposed
    for group in profile.groups:
        yield "ranks of groups", (group.here, group.size), (len(files), len(files))
        yield "bytes", group.bytes, true.num_bytes[group.collective]
        said = ns(group.sent_s) if group.is_met else None
        yield "time of sending", said, true.sent_ns[group.collective]
