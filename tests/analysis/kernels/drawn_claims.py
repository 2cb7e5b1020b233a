"""What sentences say of drawn programs, and what is said of all ranks, beside what is true."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from cs336.analysis.kernels.step_profile import StepProfile
from cs336.report.section import Finding
from tests.analysis.kernels.drawn_machine import Machine
from tests.analysis.kernels.drawn_plans import Part, Pause
from tests.analysis.kernels.drawn_programs import KERNELS
from tests.analysis.kernels.drawn_truth import LAUNCHING, QUEUED, Truth
from tests.analysis.kernels.tracing import ns

TOLERANCE = 0.02
"""Share of the file's time by which a sum of idle times may be longer than the truth: a gap of two
causes is of one of them.
"""
CAUSES: dict[str, tuple[str, ...]] = {
    "late launch": (LAUNCHING, Pause.PREPARING),
    "waiting for data": (Pause.DATA,),
    "memory allocation": (Pause.ALLOCATION,),
    "host pause": (*Pause, LAUNCHING),
    "host waited": (Pause.WAITING, LAUNCHING),
    "between kernels": (QUEUED,),
}
"""What may have been true of the host for each cause of idle time that can be said."""
_WORDS = {Part.DATA: "data", Part.EVALUATION: "forward", "": "unattributed"}


@dataclass(frozen=True)
class Claim:
    """One thing that a sentence says."""

    what: str
    is_right: bool
    true: str


@dataclass(frozen=True)
class Said:
    """A finding, and the truth that it is compared with."""

    finding: Finding
    what: str
    """The rest of its code: a limit, a cause or a phase."""
    sums: dict[str, float]
    """Its numbers over all steps, in ns where they are times."""
    truth: Truth

    def at_most(self, key: str, true_ns: float) -> Claim:
        said = self.sums[key]
        is_right = said <= true_ns + TOLERANCE * self.truth.wall_ns
        return Claim(key, is_right, f"{said:.0f} ns, truly at most {true_ns:.0f}")


def claims(finding: Finding, num_steps: int, truth: Truth) -> Iterator[Claim]:
    """The claims of a finding, whose times are those of one step of so many."""
    yield from _advice(finding.text, truth)
    code, _, rest = finding.code.partition(" ")
    is_explained = truth.is_timed or code not in _TIMED
    if not finding.text.startswith("In doubt") and code in _CLAIMS and is_explained:
        sums = {name: value * num_steps * 1e9 for name, value in finding.numbers.items()}
        yield from _CLAIMS[code](Said(finding, rest, sums, truth))


def _limit(said: Said) -> Iterator[Claim]:
    truth, wall = said.truth, said.truth.wall_ns
    limits = {
        "late_s": truth.idle_at_most(*CAUSES["late launch"]),
        "data_s": truth.idle_at_most(Pause.DATA),
        "copies_s": truth.copies_alone,
        "busy_s": truth.busy_ns,
        "step_s": wall,
    }
    shares = {
        "launches": limits["late_s"] / wall,
        "data": limits["data_s"] / wall,
        "copies": limits["copies_s"] / wall,
        "communication": truth.collectives[1] / wall,
        # a step may begin before the first work of the file, and end after the last
        "idle": sum(gap.length_ns for gap in truth.gaps) / truth.plan.devices / wall,
        "gpu": truth.busy_share - 0.5,
    }
    share = shares.get(said.what, 1)
    yield Claim(f"limit {said.what}", share > 0.1, f"its share is {share:.3f}")
    for key, most in limits.items():
        yield said.at_most(key, most)


def _kinds(said: Said) -> Iterator[Claim]:
    for name, count in said.finding.numbers.items():
        if name.endswith(" steps"):
            right = said.truth.count_of_kind(name.removesuffix(" steps"))
            yield Claim("steps of kinds", count in right, f"{count} {name}, truly {right}")


def _passes(said: Said) -> Iterator[Claim]:
    true, passes = said.truth.plan.micro_batches, said.finding.numbers["passes"]
    is_hidden = said.truth.plan.dropped in ("range", "call")
    yield Claim("passes in a step", passes == true or is_hidden, f"{passes}, truly {true}")


def _gap(said: Said) -> Iterator[Claim]:
    truth, length = said.truth, said.finding.numbers["idle"] * 1e9
    longest = truth.longest_idle()
    yield Claim("a gap stands out", length < 1.01 * longest, f"the longest has {longest} ns")
    gaps = [gap for gap in truth.gaps if gap.length_ns > 0.9 * length]
    if said.what in CAUSES and gaps:
        fits = any(gap.time_of(CAUSES[said.what]) > 0.3 * length for gap in gaps)
        yield Claim(f"why: {said.what}", fits, f"{[gap.reasons for gap in gaps][:2]}")


def _bounds(said: Said) -> Iterator[Claim]:
    """`test_drawn_gains.py` compares gains with those of the same program run again."""
    truth = said.truth
    idle = (1 - truth.busy_share) * truth.wall_ns
    for key in said.sums:
        yield said.at_most(key, idle + truth.wall_ns - truth.profiled_ns)


def _waits(said: Said) -> Iterator[Claim]:
    doing = [part for part in said.truth.recorded.doing if part.name == Pause.WAITING]
    phases = {_WORDS.get(part.phase, part.phase) for part in doing}
    if "before backward" in said.finding.text:  # whatever the program did there
        phases.add("forward")
    is_right = said.what.removeprefix("in ") in phases
    yield Claim("where the host waits", is_right, f"in {sorted(phases)}")


def _pauses(said: Said) -> Iterator[Claim]:
    yield said.at_most("idle_s", said.truth.idle_at_most(*CAUSES["host pause"]))
    phases = {_WORDS.get(phase, phase) for phase in said.truth.phases_after_gaps(5_000)}
    is_right = said.what.removeprefix("in ") in {*phases, "unattributed"}
    yield Claim("before which kernels it idles", is_right, f"before {sorted(phases)}")


def _communication(said: Said) -> Iterator[Claim]:
    total, exposed = said.truth.collectives
    if not any("PtoP" in job.name for job in said.truth.jobs):
        yield said.at_most("total_s", total)
        yield said.at_most("exposed_s", exposed)


def _optimizer(said: Said) -> Iterator[Claim]:
    truth = said.truth
    jobs = [job for job in truth.kernels if job.phase == Part.OPTIMIZER]
    is_shown = bool(truth.num_optimizers) or "shown" in map(truth.evidence, jobs)
    yield Claim("there is an optimizer", is_shown, "no range or kernel of an optimizer")


_CLAIMS: dict[str, Callable[[Said], Iterator[Claim]]] = {
    "limit": _limit,
    "kinds": _kinds,
    "passes": _passes,
    "gap": _gap,
    "bounds": _bounds,
    "waits": _waits,
    "pauses": _pauses,
    "communication": _communication,
    "optimizer": _optimizer,
}
_TIMED = frozenset({"limit", "gap", "bounds", "late", "pauses"})
"""Codes that are about idle time, which cannot be explained where the file lacks its ends."""


def _advice(text: str, truth: Truth) -> Iterator[Claim]:
    in_graphs = sum(job.is_in_graph for job in truth.kernels) / len(truth.kernels)
    if re.search("CUDA graph|cuda-graph|reduce-overhead", text) and in_graphs > 0.8:
        yield Claim("advice: graphs", False, f"{in_graphs:.2f} of the kernels are of graphs")
    is_compiled = any(job.name.startswith("triton_") for job in truth.kernels)
    if "torch.compile" in text and is_compiled:
        yield Claim("advice: compile", False, "some kernels are the compiler's")
    is_trained = truth.plan.kind not in ("inference", "server")
    if re.search("during backward|he optimizer", text) and not is_trained:
        yield Claim("advice: training", False, "inference")


def rank_claims(
    profile: StepProfile, files: Sequence[Machine]
) -> Iterator[tuple[str, object, object]]:
    """What is compared, what is said and what is true of the collectives of all ranks, which end
    together; None is said for what is not seen.
    """
    rows = [[job for job in file.jobs if "Group size" in job.args] for file in files]
    names = {of_torch: what for what, (_, of_torch) in KERNELS.items()}
    spread: list[int] = []
    waited, last_of = [0] * len(files), [0] * len(files)
    sent_ns, num_bytes = Counter[str](), Counter[str]()
    for jobs in zip(*rows, strict=True):
        starts = [job.start_ns for job in jobs]
        last, name = max(starts), names[jobs[0].args["Collective name"]]
        spread.append(last - min(starts))
        if starts.count(last) == 1:
            last_of[starts.index(last)] += 1
        for rank, job in enumerate(jobs):
            waited[rank] += last - job.start_ns
            sent_ns[name] += job.end_ns - last
            num_bytes[name] += 2 * job.args["In msg nelems"]
    is_met = bool(profile.ranks) and all(rank.waited_s is not None for rank in profile.ranks)
    said = [sum(map(ns, rank.waited_s or ())) for rank in profile.ranks]
    yield "waits", said if is_met else None, waited
    said = [sum(rank.last or ()) for rank in profile.ranks]
    yield "which rank is last", said if is_met else None, last_of
    largest = max((ns(skew.largest_s) for skew in profile.skew), default=None)
    yield "largest skew", largest, max(spread, default=None)
    if len(profile.skew) == 1:
        yield "median skew", round(profile.skew[0].median_s * 1e9, 1), float(median(spread))
    exposed = sum(Truth(file).collectives[1] for file in files)
    yield "exposed", sum(ns(group.exposed_s) for group in profile.groups) or None, exposed
    for group in profile.groups:
        yield "ranks of groups", (group.here, group.size), (len(files), len(files))
        yield "bytes", group.bytes, num_bytes[group.collective]
        sent = ns(group.sent_s) if group.is_met else None
        yield "time of sending", sent, sent_ns[group.collective]
