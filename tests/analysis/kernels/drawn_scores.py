"""Compares what is said of a drawn program with what is true of it."""

import re
import shutil
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cs336.analysis.columns import ProfileError
from cs336.analysis.kernels.attribution import Attribution, attribute
from cs336.analysis.kernels.explain import explain, summarise
from cs336.analysis.kernels.phases import PHASES
from cs336.analysis.kernels.readers import read_trace
from cs336.analysis.kernels.step_profile import StepProfile
from cs336.report.section import Finding
from cs336.report.sections.kernels.entry import Explained
from cs336.report.sections.kernels.findings import findings
from tests.analysis.kernels.drawn_claims import CAUSES, TOLERANCE, claims, rank_claims
from tests.analysis.kernels.drawn_files import write
from tests.analysis.kernels.drawn_machine import Machine, recorded
from tests.analysis.kernels.drawn_plans import Part, Pause, Plan, draw
from tests.analysis.kernels.drawn_programs import simulate
from tests.analysis.kernels.drawn_truth import MODULE, Truth
from tests.analysis.kernels.kineto_files import BASE_NS
from tests.analysis.kernels.tracing import ns

RIGHT, NOT_SEEN, GUESS, FALSE = VERDICTS = "right", "not seen", "guess", "false"


@dataclass(frozen=True)
class Score:
    """One statement about a draw."""

    kind: str
    verdict: str
    cause: str = ""
    """What kind of mistake it is."""
    said: object = ""
    true: object = ""


def _judged(kind: str, is_right: bool, *about: object) -> Score:
    return Score(kind, RIGHT if is_right else FALSE, *about)  # type: ignore[arg-type]


def _compared(kind: str, said: object, true: object, cause: str = "") -> Score:
    return _judged(kind, said == true, cause, said, true)


def scores(plan: Plan, directory: Path) -> list[Score]:
    """Simulate the program, read its files and compare."""
    machines = simulate(plan)
    files = [recorded(machine) for machine in machines]
    truth = Truth(files[0])
    paths = [write(file, directory) for file in files]
    if not truth.kernels:
        return []
    attribution = attribute(read_trace(paths[0]))
    profile = summarise(attribution, source="drawn")
    made = [
        *_sums(profile, truth),
        *_steps(profile, truth),
        *_labels(profile, truth),
        *_kernels(attribution, truth),
        *_operators(attribution, profile, truth),
        *_busy(attribution, profile, truth),
        *_communication(profile, truth),
        *_findings(findings(Explained(profile=profile)), profile, truth),
    ]
    if truth.is_timed:
        made += [*_idle(profile, truth), *_reasons(profile, truth)]
    if plan.ranks > 1 and plan.cut == (0, 1) and not plan.dropped:
        made += _ranks(_of_all(paths[0]), files)
    return made


def _of_all(path: Path) -> StepProfile:
    """The profile of all ranks, by their directory or, where that is no run, by one of them."""
    try:
        return explain(path.parent)
    except ProfileError:
        return explain(path)


def scored(first: int, count: int, directory: Path) -> list[tuple[int, Score]]:
    """The scores of consecutive seeds."""
    made = []
    for seed in range(first, first + count):
        place = directory / str(seed)
        place.mkdir()
        made += [(seed, score) for score in scores(draw(seed), place)]
        shutil.rmtree(place)
    return made


def _sums(profile: StepProfile, truth: Truth) -> Iterator[Score]:
    yield _compared("sums", profile.num_kernels, len(truth.kernels), "number of kernels")
    true = sum(job.end_ns - job.start_ns for job in truth.kernels)
    yield _compared("sums", ns(profile.kernel_s), true, "time of kernels")
    in_steps = sum(sum(phase.launches) for phase in profile.phases)
    modules = sum(module.count for module in profile.modules)
    yield _compared("sums", modules, in_steps, "kernels of modules")


def _is_of_file(profile: StepProfile, truth: Truth) -> bool:
    """Whether the whole file is said to be one step, because no steps were seen."""
    right, _ = truth.step_counts()
    return profile.is_whole_trace or (profile.num_steps == 1 and 1 not in right)


def _steps(profile: StepProfile, truth: Truth) -> Iterator[Score]:
    right, is_shown = truth.step_counts()
    said, spans = profile.num_steps, truth.step_ranges
    how = f"{truth.plan.style}, {'ranges of steps' if is_shown else 'no ranges of steps'}"
    if _is_of_file(profile, truth):
        yield Score("steps", NOT_SEEN, how, "the whole file", sorted(right))
        return
    yield _judged("steps", said in right, how, said, sorted(right))
    if is_shown and said == len(spans) and truth.is_listed:
        durations = [span.end_ns - span.start_ns for span in spans]
        yield _compared("step times", [ns(time) for time in profile.step_s], durations, how)
        by_phase = [phase.launches for phase in profile.phases]
        launches = [sum(counts) for counts in zip(*by_phase, strict=True)]
        true = [len(truth.launched_in(span)) for span in spans]
        yield _compared("kernels of steps", launches, true, how)


def _labels(profile: StepProfile, truth: Truth) -> Iterator[Score]:
    """The kinds of steps of servers, with batch and tokens where the range's name says them."""
    spans = [span for span in truth.step_ranges if span.means != Part.STEP]
    if not spans or len(spans) != profile.num_steps:
        return
    if not profile.step_labels:
        is_one = len({span.label for span in spans}) == 1
        yield Score("kinds", RIGHT if is_one else NOT_SEEN, truth.plan.style)
        return
    for span, label in zip(spans, profile.step_labels, strict=True):
        kind, batch, tokens = span.label.split()
        if kind == Part.DECODE or not truth.plan.is_mixed:
            is_right = label.kind == kind and label.batch in (None, int(batch))
            is_right = is_right and label.tokens in (None, int(tokens))
            yield _judged("kinds", is_right, "", label, span.label)


def _kernels(attribution: Attribution, truth: Truth) -> Iterator[Score]:
    """Phases of kernels and of copies that have one, and modules by the frames of Python and by
    autograd's nodes.
    """
    trace, jobs = attribution.trace, attribution.jobs
    base = 0 if truth.plan.is_nsys else BASE_NS
    said = {}
    for row in range(len(jobs)):
        name = trace.strings[trace.ranges.name[jobs.module[row]]] if jobs.module[row] >= 0 else ""
        key = int(jobs.start_ns[row]) - base, int(jobs.stream[row]), int(jobs.device[row])
        module = name if name.startswith(MODULE) else ""
        said[key] = PHASES[jobs.phase[row]].value, module
    counts: Counter[tuple[str, str, str]] = Counter()
    for job in truth.jobs:
        phase, module = said[job.start_ns, job.stream, job.device]
        if job.kind == "copy" and phase == "unattributed":
            continue
        evidence, true = truth.evidence(job), truth.module_of(job)
        verdict = _of_phase(phase, truth.phases_of(job), evidence)
        cause = f"{job.phase or 'no phase'} ({evidence or 'nothing shows it'}) -> {phase}"
        counts["phases", verdict, cause] += 1
        if (true or module) and job.kind == "kernel":
            verdict = _judged("", module == true).verdict if module else NOT_SEEN
            counts["modules", verdict, f"{job.phase}: {true} -> {module}"] += 1
    for (kind, verdict, cause), count in counts.items():
        yield Score(kind, verdict, cause, f"{count} kernels")


def _of_phase(claim: str, right: set[str], evidence: str) -> str:
    if claim in right:
        return RIGHT if evidence else GUESS
    if claim == "unattributed":
        return RIGHT if right in ({""}, {"clip"}) else NOT_SEEN
    return FALSE


def _is_complete(profile: StepProfile) -> bool:
    left = profile.left
    return not (left.outside or left.warmup or left.no_launch or left.cut)


def _is_whole(attribution: Attribution, profile: StepProfile) -> bool:
    return _is_complete(profile) and bool((attribution.jobs.step >= 0).all())


def _operators(attribution: Attribution, profile: StepProfile, truth: Truth) -> Iterator[Score]:
    """Time by operator, where all kernels are in steps."""
    said, true = Counter[str](), Counter[str]()
    for part in profile.operators:
        said[part.name] += ns(part.total_s)
    for job in truth.kernels:
        true[truth.operator_of(job)] += job.end_ns - job.start_ns
    if said:
        times = sum(ns(time) for phase in profile.phases for time in phase.kernel_s)
        yield _compared("sums", said.total(), times, "operators")
        if _is_whole(attribution, profile):
            yield _judged("operators", said == true, "", said, true)


def _busy(attribution: Attribution, profile: StepProfile, truth: Truth) -> Iterator[Score]:
    # the mean over the devices, each of whose times is rounded
    devices, count = truth.plan.devices, profile.num_steps * len(profile.phases)
    busy = devices * sum(ns(time) for phase in profile.phases for time in phase.busy_s)
    wall = sum(ns(time) for phase in profile.phases for time in phase.wall_s)
    if _is_of_file(profile, truth):
        yield _compared("busy", wall, truth.profiled_ns, "bounds of the file")
    if _is_whole(attribution, profile) and not truth.plan.shift_ns:
        is_right = abs(busy - truth.busy_ns) <= (devices - 1) * count
        yield _judged("busy", is_right, "busy time", busy, truth.busy_ns)
    elif devices == 1 and busy > truth.busy_ns:
        yield Score("busy", FALSE, "more than there is", busy, truth.busy_ns)


def _idle(profile: StepProfile, truth: Truth) -> Iterator[Score]:
    said: Counter[str] = Counter()
    for row in profile.idle:
        said[str(row.cause)] += ns(row.total_s)
    slack = TOLERANCE * truth.profiled_ns
    for cause, time_ns in said.items():
        if cause != "end of step" and time_ns >= slack:
            most = truth.idle_at_most(*CAUSES.get(cause, (cause,)))
            yield _judged("idle", time_ns <= most + slack, cause, time_ns, f"at most {most}")


_NAMED = {
    Pause.DATA: r"DataLoader|data|get_batch",
    Pause.RANGE: r"tokenize and log",
    Pause.COLLECTOR: r"Python GC",
    Pause.ALLOCATION: r"cudaMalloc|allocation",
    Pause.COMPILING: r"CachingAutotuner",
}
"""What is said where idle time is explained by what the file shows of the host."""


def _reasons(profile: StepProfile, truth: Truth) -> Iterator[Score]:
    """Whether idle times are explained by what was open on the host, and by nothing else."""
    said = " ".join(f"{gap.cause} {gap.host_range} {gap.host_call}" for gap in profile.gaps)
    for reason, names in _NAMED.items():
        is_long = truth.idle_ns(reason) > 0.1 * truth.profiled_ns
        if is_long and any(re.search(names, span.name) for span in truth.written):
            verdict = RIGHT if re.search(names, said) else NOT_SEEN
            yield Score("idle reasons", verdict, str(reason))
    for gap in profile.gaps:
        length = ns(gap.duration_s)
        alike = [one for one in truth.gaps if one.holds(length)]
        # a gap at the edge of a step is a part of one
        if gap.before and gap.host_range and alike and gap.duration_s > 1e-4:
            is_right = any(truth.is_open(gap.host_range, one, length) for one in alike)
            true = [one.reasons for one in alike][:2]
            yield _judged("idle reasons", is_right, "what was open", gap.host_range, true)


def _communication(profile: StepProfile, truth: Truth) -> Iterator[Score]:
    if truth.plan.devices > 1:
        return
    rows = [row for row in profile.communication if row.collective is None]
    said = sum(ns(time) for row in rows for time in row.total_s)
    alone = sum(ns(time) for row in rows for time in row.exposed_s)
    total, exposed = truth.collectives
    if not said:
        if total:
            yield Score("communication", NOT_SEEN, truth.plan.style, "0", total)
    elif _is_complete(profile) and not truth.plan.shift_ns:
        yield _compared("communication", said, total, "total")
        yield _compared("communication", alone, exposed, "exposed")
    else:  # where clocks do not agree, some collectives seem to run outside of the steps
        is_part = said <= total and alone <= exposed
        yield _judged("communication", is_part, "of a part", (said, alone), (total, exposed))


def _ranks(profile: StepProfile, files: Sequence[Machine]) -> Iterator[Score]:
    for what, said, true in rank_claims(profile, files):
        if said is None and true:
            yield Score("ranks", NOT_SEEN, what, "", true)
        elif _is_complete(profile) or what == "ranks of groups":
            yield _compared("ranks", said or None, true or None, what)
        elif what != "median skew":
            # collectives outside of the steps are not among those that are told
            whole = zip(_listed(said), _listed(true), strict=True)
            is_part = all(part <= total for part, total in whole)
            yield _judged("ranks", is_part, f"{what} of a part", said, true)


def _listed(value: object) -> list[float]:
    """The numbers, or the one number; none for nothing."""
    if isinstance(value, list):
        return value
    return [value] if isinstance(value, int | float) else []


def _findings(said: Sequence[Finding], profile: StepProfile, truth: Truth) -> Iterator[Score]:
    for finding in said:
        for claim in claims(finding, profile.num_steps, truth):
            yield _judged("sentences", claim.is_right, claim.what, finding.text, claim.true)
    waits = truth.is_timed and truth.idle_ns(Pause.DATA) >= 0.25 * truth.profiled_ns
    if waits and any(span.means == Part.DATA for span in truth.ranges):
        is_told = any("data" in finding.text.lower() for finding in said)
        yield Score("data", RIGHT if is_told else NOT_SEEN, "data limits")


def table(made: Sequence[tuple[int, Score]]) -> str:
    """Figures by kind, then what fails, by cause, with the smallest seeds."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    failures: defaultdict[tuple[str, str, str], list[tuple[int, Score]]] = defaultdict(list)
    for seed, score in made:
        counts[score.kind][score.verdict] += 1
        counts["all"][score.verdict] += 1
        failures[score.verdict, score.kind, score.cause].append((seed, score))
    lines = [f"| kind | {' | '.join(VERDICTS)} |", "|---|---|---|---|---|"]
    for kind, of_kind in counts.items():
        lines.append(f"| {kind} | {' | '.join(str(of_kind[verdict]) for verdict in VERDICTS)} |")
    for wanted in (FALSE, GUESS, NOT_SEEN):
        lines += ["", f"## {wanted}", "", "| kind | cause | draws | seeds | said | true |"]
        lines.append("|---|---|---|---|---|---|")
        rows = [(key, value) for key, value in failures.items() if key[0] == wanted]
        for (_, kind, cause), seen in sorted(rows, key=lambda row: -len(row[1])):
            seeds = " ".join(str(seed) for seed, _ in seen[:4])
            said, true = str(seen[0][1].said)[:160], str(seen[0][1].true)[:120]
            lines.append(f"| {kind} | {cause} | {len(seen)} | {seeds} | {said} | {true} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table of as many seeds as asked for, and the plan of one alone."""
    first, count = map(int, sys.argv[1:3])
    if count == 1:
        print(draw(first), end="\n\n")
    with tempfile.TemporaryDirectory() as directory:
        print(table(scored(first, count, Path(directory))))


if __name__ == "__main__":
    main()
