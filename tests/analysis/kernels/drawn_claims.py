"""What a finding claims of a drawn program, compared with what is true."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cs336.report.section import Finding
from tests.analysis.kernels.drawn_plans import Part, Pause
from tests.analysis.kernels.drawn_truth import LAUNCHING, QUEUED, Truth, length

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
WORDS = {Part.DATA: "data", Part.EVALUATION: "forward", "": "unattributed"}


@dataclass(frozen=True)
class Claim:
    """One thing that a sentence says."""

    what: str
    is_right: bool
    true: str


def claims(finding: Finding, num_steps: int, truth: Truth) -> Iterator[Claim]:
    """The claims of a finding, which are numbers per step of so many steps."""
    yield from _advice(finding.text, truth)
    if finding.text.startswith("In doubt"):
        return
    # numbers per step become sums over the steps again
    sums = {name: value * num_steps * 1e9 for name, value in finding.numbers.items()}
    code, _, rest = finding.code.partition(" ")
    if code in _CLAIMS and (truth.is_timed or code not in _TIMED):
        yield from _CLAIMS[code](finding, rest, sums, truth)


def _wall(truth: Truth) -> int:
    first, last = truth.bounds
    start, end = truth.bounds_of_host
    return max(last, end) - min(first, start)


def _busy_share(truth: Truth) -> float:
    """The mean over the devices, between the first event of any and the last."""
    busy = sum(length(truth.busy(device)) for device in range(truth.plan.devices))
    first, last = truth.bounds
    return busy / truth.plan.devices / max(last - first, 1)


def _at_most(what: str, said_ns: float, true_ns: float, truth: Truth) -> Claim:
    is_right = said_ns <= true_ns + TOLERANCE * _wall(truth)
    return Claim(what, is_right, f"{said_ns:.0f} ns, truly at most {true_ns:.0f}")


def _limit(finding: Finding, limit: str, sums: dict[str, float], truth: Truth) -> Iterator[Claim]:
    wall, busy = _wall(truth), _busy_share(truth)
    _, exposed = truth.collectives()
    shares = {
        "launches": truth.idle_at_most(*CAUSES["late launch"]) / wall,
        "data": truth.idle_at_most(Pause.DATA) / wall,
        "copies": truth.copies_alone() / wall,
        "communication": exposed / wall,
        # a step may begin before the first work of the file, and end after the last
        "idle": sum(gap.length_ns for gap in truth.all_gaps()) / truth.plan.devices / wall,
        "gpu": busy - 0.5,
    }
    told = f"the share is {shares.get(limit, 1):.3f}, busy {busy:.3f}"
    yield Claim(f"limit {limit}", shares.get(limit, 1) > 0.1, told)
    late = truth.idle_at_most(*CAUSES["late launch"])
    yield _at_most("late launches", sums["late_s"], late, truth)
    yield _at_most("time for data", sums["data_s"], truth.idle_at_most(Pause.DATA), truth)
    yield _at_most("time of copies", sums["copies_s"], truth.copies_alone(), truth)
    whole = sum(length(truth.busy(device)) for device in range(truth.plan.devices))
    yield _at_most("busy time", sums["busy_s"], whole, truth)
    yield _at_most("time of steps", sums["step_s"], wall, truth)


def _kinds(finding: Finding, _: str, sums: dict[str, float], truth: Truth) -> Iterator[Claim]:
    for name, count in finding.numbers.items():
        if name.endswith(" steps"):
            right = truth.count_of_kind(name.removesuffix(" steps"))
            yield Claim("steps of kinds", count in right, f"{count} {name}, truly {right}")


def _passes(finding: Finding, _: str, sums: dict[str, float], truth: Truth) -> Iterator[Claim]:
    true = truth.plan.micro_batches
    said = finding.numbers["passes"]
    is_seen = truth.plan.dropped not in ("ranges", "launches")
    yield Claim("passes in a step", said == true or not is_seen, f"{said}, truly {true}")


def _gap(finding: Finding, cause: str, sums: dict[str, float], truth: Truth) -> Iterator[Claim]:
    said = finding.numbers["idle"] * 1e9
    gaps = [
        gap
        for device in range(truth.plan.devices)
        for gap in truth.gaps(device, edges=True)
        if gap.length_ns > 0.9 * said
    ]
    longest = truth.longest_idle()
    yield Claim("a gap stands out", said < 1.01 * longest, f"the longest has {longest} ns")
    reasons = CAUSES.get(cause)
    if reasons is not None and gaps:
        fits = any(sum(gap.reasons.get(r, 0) for r in reasons) > 0.3 * said for gap in gaps)
        yield Claim(f"why: {cause}", fits, f"{[gap.reasons for gap in gaps][:2]}")


def _bounds(finding: Finding, _: str, sums: dict[str, float], truth: Truth) -> Iterator[Claim]:
    """`test_drawn_gains.py` compares gains with those of the same program run again."""
    idle = (1 - _busy_share(truth)) * _wall(truth)
    most = idle + _wall(truth) - (truth.bounds[1] - truth.bounds[0])
    for name, said in sums.items():
        yield _at_most(name, said, most, truth)


def _waits(finding: Finding, phase: str, sums: dict[str, float], truth: Truth) -> Iterator[Claim]:
    true = truth.phases_doing(Pause.WAITING)
    said = {WORDS.get(part, str(part)) for part in true}
    if "before backward" in finding.text:  # whatever the program did there
        said.add("forward")
    yield Claim("where the host waits", phase.removeprefix("in ") in said, f"in {sorted(said)}")


def _pauses(finding: Finding, phase: str, sums: dict[str, float], truth: Truth) -> Iterator[Claim]:
    most = truth.idle_at_most(*CAUSES["host pause"])
    yield _at_most("pauses", sums["idle_s"], most, truth)
    before = truth.phases_after_gaps(5_000)
    said = {WORDS.get(part, str(part)) for part in before}
    phase = phase.removeprefix("in ")
    is_right = phase in said or phase == "unattributed"
    yield Claim("before which kernels it idles", is_right, f"before {sorted(said)}")


def _communication(
    finding: Finding, _: str, sums: dict[str, float], truth: Truth
) -> Iterator[Claim]:
    total, exposed = truth.collectives()
    if any("PtoP" in job.name for job in truth.jobs):
        return
    yield _at_most("communication", sums["total_s"], total, truth)
    yield _at_most("exposed communication", sums["exposed_s"], exposed, truth)


def _optimizer(finding: Finding, _: str, sums: dict[str, float], truth: Truth) -> Iterator[Claim]:
    is_shown = bool(truth.optimizers) or any(
        truth.phase_of(job) == ({Part.OPTIMIZER}, "shown") for job in truth.kernels
    )
    yield Claim("there is an optimizer", is_shown, "no range or kernel of an optimizer")


_CLAIMS: dict[str, Callable[[Finding, str, dict[str, float], Truth], Iterator[Claim]]] = {
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
_TIMED = frozenset({"limit", "gap", "bounds", "pauses"})
"""Codes that are about idle time, which cannot be explained where the file lacks its ends."""


def _advice(text: str, truth: Truth) -> Iterator[Claim]:
    in_graphs = sum(job.is_in_graph for job in truth.kernels) / len(truth.kernels)
    if re.search("CUDA graph|cuda-graph|reduce-overhead", text) and in_graphs > 0.8:
        yield Claim("advice: graphs", False, f"{in_graphs:.2f} of the kernels are of graphs")
    if "torch.compile" in text and any(job.name.startswith("triton_") for job in truth.kernels):
        yield Claim("advice: compile", False, "some kernels are the compiler's")
    if truth.plan.kind in ("inference", "server") and re.search(
        "during backward|he optimizer", text
    ):
        yield Claim("advice: training", False, "inference")
