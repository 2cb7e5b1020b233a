"""Compares what is said of a drawn program with what is true of it."""

import re
import shutil
import sys
import tempfile
from collections import Counter
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
from tests.analysis.kernels.drawn_claims import CAUSES, claims
from tests.analysis.kernels.drawn_files import write
from tests.analysis.kernels.drawn_plans import Part, Pause, Plan, draw
from tests.analysis.kernels.drawn_programs import Recorded, recorded, simulate
from tests.analysis.kernels.drawn_ranks import rank_claims
from tests.analysis.kernels.drawn_truth import MODULE, Truth, length
from tests.analysis.kernels.kineto_files import BASE_NS
from tests.analysis.kernels.tracing import ns

RIGHT, NOT_SEEN, FALSE, GUESS = "right", "not seen", "false", "guess"


@dataclass(frozen=True)
class Score:
    """One statement about a draw."""

    kind: str
    verdict: str
    cause: str = ""
    """What kind of mistake it is."""
    said: str = ""
    true: str = ""


def scores(plan: Plan, directory: Path) -> list[Score]:
    """Simulate the program, read its files and compare."""
    run = simulate(plan)
    files = [recorded(run, rank) for rank in range(plan.ranks)]
    truth = Truth(files[0])
    paths = [write(file, directory) for file in files]
    if not truth.kernels:
        return []
    attribution = attribute(read_trace(paths[0]))
    profile = summarise(attribution, source="drawn")
    said = findings(Explained(profile=profile))
    made = [
        *_sums(profile, truth),
        *_steps(profile, truth),
        *_labels(profile, truth),
        *_phases(attribution, truth),
        *_modules(attribution, truth),
        *_operators(attribution, profile, truth),
        *_busy(profile, truth, is_whole=bool((attribution.jobs.step >= 0).all())),
        *_idle(profile, truth),
        *_reasons(profile, truth),
        *_communication(profile, truth),
        *_findings(said, profile, truth),
    ]
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


def _compared(kind: str, said: object, true: object, cause: str = "") -> Score:
    verdict = RIGHT if said == true else FALSE
    return Score(kind, verdict, cause, str(said), str(true))


def _sums(profile: StepProfile, truth: Truth) -> Iterator[Score]:
    yield _compared("sums", profile.num_kernels, len(truth.kernels), "number of kernels")
    yield _compared("sums", ns(profile.kernel_s), truth.kernel_ns, "time of kernels")
    in_steps = sum(sum(phase.launches) for phase in profile.phases)
    modules = sum(module.count for module in profile.modules)
    yield _compared("sums", modules, in_steps, "kernels of modules")


def _is_of_file(profile: StepProfile, truth: Truth) -> bool:
    """Whether the whole file is said to be one step, because no steps were seen."""
    right, _ = truth.step_counts()
    return profile.is_whole_trace or (profile.num_steps == 1 and 1 not in right)


def _steps(profile: StepProfile, truth: Truth) -> Iterator[Score]:
    right, is_shown = truth.step_counts()
    said = profile.num_steps
    how = f"{truth.plan.style}, {'ranges of steps' if is_shown else 'no ranges of steps'}"
    if _is_of_file(profile, truth):
        yield Score("steps", NOT_SEEN, how, "the whole file", str(sorted(right)))
        return
    verdict = RIGHT if said in right else FALSE
    yield Score("steps", verdict, how, str(said), str(sorted(right)))
    spans = truth.step_ranges
    if not is_shown or said != len(spans) or not truth.is_listed:
        return
    durations = [span.end_ns - span.start_ns for span in spans]
    yield _compared("step times", [ns(time) for time in profile.step_s], durations, how)
    launches = [0] * said
    for phase in profile.phases:
        launches = [a + b for a, b in zip(launches, phase.launches, strict=True)]
    true = [len(truth.launched_in(span)) for span in spans]
    yield _compared("kernels of steps", launches, true, how)


def _labels(profile: StepProfile, truth: Truth) -> Iterator[Score]:
    """The kinds of steps of servers, with batch and tokens where the range's name says them."""
    spans = [span for span in truth.step_ranges if span.means != Part.STEP]
    if not spans or len(spans) != profile.num_steps:
        return
    if not profile.step_labels:
        is_one = len({truth.recorded.kinds[span.number] for span in spans}) == 1
        yield Score("kinds", RIGHT if is_one else NOT_SEEN, truth.plan.style)
        return
    for span, label in zip(spans, profile.step_labels, strict=True):
        kind, batch, tokens = truth.recorded.kinds[span.number].split()
        said = f"{label.kind} {label.batch} {label.tokens}"
        if kind == Part.PREFILL and truth.plan.is_mixed:
            continue
        is_right = label.kind == kind and label.batch in (None, int(batch))
        is_right = is_right and label.tokens in (None, int(tokens))
        yield Score("kinds", RIGHT if is_right else FALSE, "", said, f"{kind} {batch} {tokens}")


def _modules(attribution: Attribution, truth: Truth) -> Iterator[Score]:
    """The module of each kernel by the frames of Python, and by autograd's nodes."""
    trace, jobs = attribution.trace, attribution.jobs
    base = 0 if truth.plan.is_nsys else BASE_NS
    said = {}
    for row in range(len(trace.kernels)):
        name = trace.strings[trace.ranges.name[jobs.module[row]]] if jobs.module[row] >= 0 else ""
        key = int(jobs.start_ns[row]) - base, int(jobs.stream[row]), int(jobs.device[row])
        said[key] = name if name.startswith(MODULE) else ""
    counts: Counter[tuple[str, str]] = Counter()
    for job in truth.kernels:
        claim, true = said[job.start_ns, job.stream, job.device], truth.module_of(job)
        if not true and not claim:
            continue
        verdict = RIGHT if claim == true else FALSE
        counts[verdict if claim else NOT_SEEN, f"{job.phase}: {true} -> {claim}"] += 1
    for (verdict, cause), count in counts.items():
        yield Score("modules", verdict, cause, f"{count} kernels")


def _operators(attribution: Attribution, profile: StepProfile, truth: Truth) -> Iterator[Score]:
    """Time by operator, where all kernels are in steps."""
    if not profile.operators:
        return
    times = sum(ns(time) for phase in profile.phases for time in phase.kernel_s)
    yield _compared("sums", sum(ns(part.total_s) for part in profile.operators), times, "operators")
    true: Counter[str] = Counter()
    for job in truth.kernels:
        true[truth.operator_of(job)] += job.end_ns - job.start_ns
    said: Counter[str] = Counter()
    for part in profile.operators:
        said[part.name] += ns(part.total_s)
    if _is_complete(profile) and (attribution.jobs.step >= 0).all():
        yield _compared("operators", dict(sorted(said.items())), dict(sorted(true.items())))


def _phases(attribution: Attribution, truth: Truth) -> Iterator[Score]:
    base = 0 if truth.plan.is_nsys else BASE_NS
    jobs = attribution.jobs
    said = {}
    for row in range(len(attribution.trace.kernels)):
        key = int(jobs.start_ns[row]) - base, int(jobs.stream[row]), int(jobs.device[row])
        said[key] = PHASES[jobs.phase[row]].value
    counts: Counter[tuple[str, str]] = Counter()
    for job in truth.kernels:
        claim = said[job.start_ns, job.stream, job.device]
        right, evidence = truth.phase_of(job)
        verdict = _of_phase(claim, right, evidence)
        cause = f"{job.phase or 'no phase'} ({evidence or 'nothing shows it'}) -> {claim}"
        counts[verdict, cause] += 1
    for (verdict, cause), count in counts.items():
        yield Score("phases", verdict, cause, f"{count} kernels")


def _of_phase(claim: str, right: set[str], evidence: str) -> str:
    if claim in right:
        return RIGHT if evidence else GUESS
    if claim == "unattributed":
        return RIGHT if right == {""} or right == {"clip"} else NOT_SEEN
    return FALSE


def _is_complete(profile: StepProfile) -> bool:
    left = profile.left
    return not (left.outside or left.warmup or left.no_launch or left.cut)


def _busy(profile: StepProfile, truth: Truth, *, is_whole: bool) -> Iterator[Score]:
    if truth.plan.devices > 1:
        return
    busy = sum(ns(time) for phase in profile.phases for time in phase.busy_s)
    wall = sum(ns(time) for phase in profile.phases for time in phase.wall_s)
    true, (first, last) = length(truth.busy()), truth.bounds
    if _is_of_file(profile, truth):
        yield _compared("busy", wall, last - first, "bounds of the file")
    is_whole = is_whole and _is_complete(profile)
    if is_whole and not truth.plan.shift_ns:
        yield _compared("busy", busy, true, "busy time")
    elif busy > true:
        yield Score("busy", FALSE, "more than there is", str(busy), str(true))


def _idle(profile: StepProfile, truth: Truth) -> Iterator[Score]:
    if not truth.is_timed:
        return
    wall = truth.bounds[1] - truth.bounds[0]
    said: dict[str, int] = {}
    for row in profile.idle:
        said[row.cause] = said.get(row.cause, 0) + ns(row.total_s)
    for cause, time_ns in said.items():
        reasons = CAUSES.get(str(cause), (str(cause),))
        if cause == "end of step" or time_ns < 0.02 * wall:
            continue
        most = truth.idle_at_most(*reasons)
        verdict = RIGHT if time_ns <= most + 0.02 * wall else FALSE
        main = _main_reason(truth)
        yield Score(
            "idle", verdict, f"{cause}; truly {main}", f"{time_ns} ns {cause}", f"at most {most}"
        )


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
    if not truth.is_timed:
        return
    said = " ".join(f"{gap.cause} {gap.host_range} {gap.host_call}" for gap in profile.gaps)
    first, last = truth.bounds
    for reason, names in _NAMED.items():
        is_long = truth.idle_ns(reason) > 0.1 * (last - first)
        if is_long and any(re.search(names, span.name) for span in truth.written):
            verdict = RIGHT if re.search(names, said) else NOT_SEEN
            yield Score("idle reasons", verdict, str(reason))
    for gap in profile.gaps:
        alike = [one for one in truth.all_gaps() if abs(one.length_ns - ns(gap.duration_s)) < 2_000]
        # a gap at the edge of a step is a part of one
        if gap.before and gap.host_range and alike and gap.duration_s > 1e-4:
            is_right = any(truth.is_open(gap.host_range, one) for one in alike)
            verdict = RIGHT if is_right else FALSE
            true = str([one.reasons for one in alike][:2])
            yield Score("idle reasons", verdict, "what was open", gap.host_range, true)


def _main_reason(truth: Truth) -> str:
    reasons: dict[str, int] = {}
    for gap in truth.gaps():
        for reason, part in gap.reasons.items():
            reasons[reason] = reasons.get(reason, 0) + part
    return max(reasons, key=reasons.__getitem__) if reasons else "nothing"


def _communication(profile: StepProfile, truth: Truth) -> Iterator[Score]:
    total, exposed = truth.collectives()
    if truth.plan.devices > 1:
        return
    rows = [row for row in profile.communication if row.collective is None]
    said = sum(ns(time) for row in rows for time in row.total_s)
    alone = sum(ns(time) for row in rows for time in row.exposed_s)
    if not said:
        if total:
            yield Score("communication", NOT_SEEN, truth.plan.style, "0", str(total))
        return
    # where clocks do not agree, some collectives seem to run outside of the steps
    if not _is_complete(profile) or truth.plan.shift_ns:
        verdict = RIGHT if said <= total and alone <= exposed else FALSE
        yield Score("communication", verdict, "of a part", f"{said} {alone}", f"{total} {exposed}")
        return
    yield _compared("communication", said, total, "total")
    yield _compared("communication", alone, exposed, "exposed")


def _ranks(profile: StepProfile, files: Sequence[Recorded]) -> Iterator[Score]:
    for what, said, true in rank_claims(profile, files):
        if said is None and true:
            yield Score("ranks", NOT_SEEN, what, "", str(true))
        elif not _is_complete(profile) and what != "ranks of groups":
            if what == "median skew":
                continue
            # collectives outside of the steps are not among those that are told
            whole = zip(_listed(said), _listed(true), strict=True)
            is_right = all(part <= total for part, total in whole)
            yield Score("ranks", RIGHT if is_right else FALSE, f"{what} of a part")
        else:
            yield _compared("ranks", said or None, true or None, what)


def _listed(value: object) -> list[float]:
    """The numbers, or the one number; none for nothing."""
    if isinstance(value, list):
        return value
    return [value] if isinstance(value, int | float) else []


def _findings(said: Sequence[Finding], profile: StepProfile, truth: Truth) -> Iterator[Score]:
    for finding in said:
        for claim in claims(finding, profile.num_steps, truth):
            verdict = RIGHT if claim.is_right else FALSE
            yield Score("sentences", verdict, claim.what, finding.text, claim.true)
    first, last = truth.bounds
    if not truth.is_timed or truth.idle_ns(Pause.DATA) < 0.25 * (last - first):
        return
    if any(span.means == Part.DATA for span in truth.ranges):
        is_told = any("data" in finding.text.lower() for finding in said)
        yield Score("data", RIGHT if is_told else NOT_SEEN, "data limits")


def table(made: Sequence[tuple[int, Score]]) -> str:
    """Figures by kind, then what fails, by cause, with the smallest seed."""
    kinds: dict[str, dict[str, int]] = {}
    failures: dict[tuple[str, str, str], list[tuple[int, Score]]] = {}
    for seed, score in made:
        counts = kinds.setdefault(score.kind, {})
        counts[score.verdict] = counts.get(score.verdict, 0) + 1
        if score.verdict != RIGHT:
            failures.setdefault((score.verdict, score.kind, score.cause), []).append((seed, score))
    verdicts = (RIGHT, NOT_SEEN, GUESS, FALSE)
    lines = [f"| kind | {' | '.join(verdicts)} |", "|---|---|---|---|---|"]
    for kind, counts in kinds.items():
        lines.append(f"| {kind} | {' | '.join(str(counts.get(v, 0)) for v in verdicts)} |")
    for wanted in (FALSE, GUESS, NOT_SEEN):
        lines += [
            "",
            f"## {wanted}",
            "",
            "| kind | cause | draws | seeds | said | true |",
            "|---|---|---|---|---|---|",
        ]
        rows = [(key, value) for key, value in failures.items() if key[0] == wanted]
        for (_, kind, cause), seen in sorted(rows, key=lambda row: -len(row[1])):
            seeds = " ".join(str(seed) for seed, _ in seen[:4])
            said, true = seen[0][1].said[:160], seen[0][1].true[:120]
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
