"""Two explained traces side by side: the step, and its parts by phase, class, module and kernel.

Steps are compared as those of two sweeps are. One process each shows little, so a difference is
only said to be one where it is beyond what processes and steps scatter.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ....analysis.compare import Comparison, Verdict, compare_apart, compare_launches
from ....analysis.difference import (
    Amount,
    Change,
    Part,
    by_difference,
    parts_of,
    per_step,
    with_rest,
)
from ....analysis.kernels.step_profile import KernelTimes, StepProfile, Work
from ....config import Phase
from ....record import Measurement
from ....text import counted
from ...column import Column
from ...difference import Difference, difference_section, named, numbers_of
from ...section import Finding, Section
from ...words import count, label, percent_of, rounded
from .figures import ms
from .files import collapsed
from .kinds import StepKind, step_kinds, wall_by_step_s
from .sums import TimedT, grouped, path_text, terms

BESIDE = "run beside others, counted twice above"
"""Name of what kernels, copies and idle times have beyond the step, as several streams or devices
run at once.
"""
NOTHING_RUNS = "no operator runs"
_MS = Column("", "ms", write=rounded, scale=1e-6)


def compared_traces(a: StepProfile, b: StepProfile, top: int) -> Difference:
    """Both traces side by side; raise ValueError, in one line, where they cannot be compared."""
    if a.work is not b.work:
        cpu, gpu = ("A", "B") if a.work is Work.OPERATORS else ("B", "A")
        raise ValueError(
            f"{cpu} lists a CPU's operators and {gpu} a GPU's kernels: compare traces of one kind"
        )
    if a.is_whole_trace is not b.is_whole_trace:
        name, other = ("A", "B") if a.is_whole_trace else ("B", "A")
        raise ValueError(
            f"{name} shows no steps and {other} does, and a whole file is no step: record both "
            "with a range around each step"
        )
    sides = Sides(a, b)
    subjects = {"Phases": sides.phases}
    for of_a, of_b in sides.kinds:
        parts = parts_of(phase_amounts(a, of_a), phase_amounts(b, of_b))
        subjects[f"Phases of {of_a.name}"] = parts
    subjects["Contents"] = sides.contents
    subjects["Modules"] = sides.parts(module_amounts)
    subjects[f"{terms(a)[0].capitalize()}s"] = sides.kernels
    sections: list[Section] = []
    for title, parts in subjects.items():
        sections.append(difference_section(f"{title}, per step", parts, top, _MS))
    findings = [_step(sides), _causes(sides), _evidence(sides), *_cautions(sides)]
    return Difference(findings=findings, sections=sections)


def ns(time_s: float) -> int:
    """The time in whole nanoseconds."""
    return round(time_s * 1e9)


@dataclass(frozen=True)
class Sides:
    """Both profiles, with the parts of their steps."""

    a: StepProfile
    b: StepProfile

    def parts(self, amounts_of: Callable[[StepProfile], Mapping[str, Amount]]) -> list[Part]:
        """The parts of both that `amounts_of` tells of one."""
        return parts_of(amounts_of(self.a), amounts_of(self.b))

    @cached_property
    def a_steps_s(self) -> list[float]:
        """The times of A's steps on the device."""
        return wall_by_step_s(self.a)

    @cached_property
    def b_steps_s(self) -> list[float]:
        """The times of B's steps on the device."""
        return wall_by_step_s(self.b)

    @cached_property
    def step(self) -> Comparison | None:
        """The steps compared; None where a file shows no time."""
        return _compared(self.a_steps_s, self.b_steps_s)

    @cached_property
    def phases(self) -> list[Part]:
        """The phases, each slower or faster if its times in the steps show it."""
        of_a = {str(times.phase): times.wall_s for times in self.a.phases}
        of_b = {str(times.phase): times.wall_s for times in self.b.phases}
        parts = []
        for part in self.parts(phase_amounts):
            compared = _compared(of_a.get(part.name, ()), of_b.get(part.name, ()))
            parts.append(_judged(part, compared))
        return parts

    @cached_property
    def contents(self) -> list[Part]:
        """Classes, copies and idle times by cause; they add up to the step."""
        parts = []
        for part in self.parts(content_amounts):
            is_counted = part.a.count + part.b.count and not part.name.startswith("idle")
            parts.append(part if is_counted else self._by_step(part))
        return parts

    def _by_step(self, part: Part) -> Part:
        """Idle time of one cause, longer or shorter where it differs by more than whole steps
        scatter. The profile has no times of single steps for it, and its count is chance.
        """
        least = None if self.step is None else self.step.least_shown
        whole_ns = sum(self.a_steps_s) / self.a.num_steps * 1e9
        change = Change.NONE
        if least is not None and abs(part.difference) > least * whole_ns:
            change = Change.LONGER if part.difference > 0 else Change.SHORTER
        return replace(part, change=change)

    @cached_property
    def kernels(self) -> list[Part]:
        """The kernels, each slower or faster if its launches show it."""
        of_a, of_b = kernels_of(self.a), kernels_of(self.b)
        among = len(of_a.keys() & of_b.keys())
        parts = []
        for part in self.parts(kernel_amounts):
            if part.change is Change.NONE and part.a.total and part.b.total:
                compared = compare_launches(of_a[part.name], of_b[part.name], among)
                part = _judged(part, compared)
            parts.append(part)
        return parts

    @cached_property
    def kinds(self) -> list[tuple[StepKind, StepKind]]:
        """The kinds of steps that both have; none where either tells no kinds apart."""
        of_b = {kind.name: kind for kind in step_kinds(self.b)}
        of_a = [kind for kind in step_kinds(self.a) if kind.name in of_b]
        return [(kind, of_b[kind.name]) for kind in of_a]


def phase_amounts(profile: StepProfile, kind: StepKind | None = None) -> dict[str, Amount]:
    """Wall time and kernels of each phase, over the steps of one kind or over all."""
    steps = range(profile.num_steps) if kind is None else kind.steps
    amounts = {}
    for times in profile.phases:
        launches = sum(times.launches[step] for step in steps)
        wall_ns = sum(ns(times.wall_s[step]) for step in steps)
        amounts[str(times.phase)] = per_step(launches, wall_ns, len(steps))
    return amounts


def _amounts(
    profile: StepProfile, rows: Iterable[TimedT], key: Callable[[TimedT], Hashable]
) -> dict[str, Amount]:
    """Count and time of the rows by key, per step."""
    amounts = {}
    for name, part in grouped(rows, key).items():
        amounts[str(name)] = per_step(part.count, ns(part.total_s), profile.num_steps)
    return amounts


def content_amounts(profile: StepProfile) -> dict[str, Amount]:
    """Classes of kernels, copies by kind, idle times by cause, and what all of these have beyond
    the step.
    """
    copies = [row for row in profile.copies if row.kind is not None]
    amounts = _amounts(profile, profile.classes, lambda row: row.kind)
    amounts |= _amounts(profile, copies, lambda row: f"copies, {row.kind}")
    amounts |= _amounts(profile, profile.idle, lambda row: f"idle, {row.cause}")
    rest = NOTHING_RUNS if profile.work is Work.OPERATORS else BESIDE
    return with_rest(amounts, sum(phase_amounts(profile).values(), Amount()), rest)


def module_amounts(profile: StepProfile) -> dict[str, Amount]:
    """Kernels of each module without those of its own modules."""
    return _amounts(profile, profile.modules, lambda row: path_text(collapsed(row.path), cut=False))


def kernels_of(profile: StepProfile) -> dict[str, KernelTimes]:
    """The kernels of the whole step by name."""
    return {kernel.name: kernel for kernel in profile.kernels_of(None)}


def kernel_amounts(profile: StepProfile) -> dict[str, Amount]:
    """The kernels of the whole step."""
    return _amounts(profile, kernels_of(profile).values(), lambda row: row.name)


def _compared(a_s: Sequence[float], b_s: Sequence[float]) -> Comparison | None:
    """The times of steps of one process each compared; None where one of them has none."""
    if not sum(a_s) or not sum(b_s):
        return None
    a, b = (Measurement(phase=Phase.STEP, times_s=tuple(side)) for side in (a_s, b_s))
    return compare_apart({0: a}, {0: b})


def _judged(part: Part, compared: Comparison | None) -> Part:
    """The part, slower or faster if the comparison shows it."""
    if compared is None or compared.verdict is Verdict.CANNOT_TELL:
        return part
    return replace(part, change=Change(compared.verdict.value))


def _step(sides: Sides) -> Finding:
    """By how much the step differs, and in which phases; of several kinds of steps each."""
    kinds = []
    for a, b in sides.kinds:
        kinds.append((f"{a.name} ", a.of(sides.a_steps_s), b.of(sides.b_steps_s)))
    numbers: dict[str, float] = {}
    codes, texts = [], []
    what = "recording" if sides.a.is_whole_trace else "step"
    for prefix, a_s, b_s in kinds or [("", sides.a_steps_s, sides.b_steps_s)]:
        code, text = _step_words(f"{prefix}{what}", a_s, b_s)
        codes.append(code)
        texts.append(text)
        numbers |= {f"{prefix}a_step_s": _mean(a_s), f"{prefix}b_step_s": _mean(b_s)}
    text = "; ".join(texts)
    if not kinds and codes != ["same"]:
        text += f": {named(sides.phases, _words)}"
        numbers |= numbers_of(sides.phases, 1e-9)
    return Finding(code=f"step {', '.join(codes)}", text=f"{text}.", numbers=numbers)


def _mean(times_s: Sequence[float]) -> float:
    return sum(times_s) / len(times_s)


def _step_words(what: str, a_s: Sequence[float], b_s: Sequence[float]) -> tuple[str, str]:
    """Whether B's is longer as one word, and in words with the times."""
    a, b = _mean(a_s), _mean(b_s)
    compared = _compared(a_s, b_s)
    times = f"{ms(a)} in A, {ms(b)} in B"
    by = f"{ms(abs(b - a))} ({percent_of(abs(b - a), a)})"
    way = "longer" if b > a else "shorter"
    if compared is not None and compared.verdict is not Verdict.CANNOT_TELL:
        return way, f"B's {what} is {by} {way} ({times})"
    if a == b:
        return "same", f"B's {what} is as long as A's: {ms(a)}"
    if compared is None or compared.least_shown is None:
        why = "a single step is no proof"
        if what == "recording":
            why = "no steps are seen, so how much work it was is not known"
        return "no proof", f"B's {what} is {by} {way} in these files ({times}), and {why}"
    why = "the steps scatter too much to tell"
    if compared.least_shown < 1:
        why = f"below {percent_of(compared.least_shown)} may be chance"
    return "same", f"B's {what} is not shown to differ: {times}; {why}"


def _words(part: Part) -> str:
    """The part with its difference in ms and its sign."""
    sign = "-" if part.difference < 0 else "+"
    return f"{part.name} {sign}{ms(abs(float(part.difference)) / 1e9)}"


def _shares_of_kinds(side: StepProfile) -> dict[str, float]:
    """The share of each kind of steps in a side's steps."""
    return {kind.name: len(kind.steps) / side.num_steps for kind in step_kinds(side)}


def _causes(sides: Sides) -> Finding:
    """The kernels, copies and idle times that differ by more than chance, the largest first."""
    shares_a, shares_b = _shares_of_kinds(sides.a), _shares_of_kinds(sides.b)
    if shares_a != shares_b and max(len(shares_a), len(shares_b)) > 1:
        text = "Kernels and modules below are means over unequal shares of the kinds of steps."
        return Finding(code="parts of unequal kinds", text=text)
    others = [part for part in sides.contents if part.name.startswith(("idle", "copies"))]
    parts = by_difference([*sides.kernels, *others])
    changed = [part for part in parts if part.change is not Change.NONE]
    kernels = kernels_of(sides.a) | kernels_of(sides.b)

    def words(part: Part) -> str:
        kernel = kernels.get(part.name)
        if kernel is None:
            return _words(part)
        times = f"{count(float(part.a.count))} and {count(float(part.b.count))} times"
        how = f"{part.change}, {times}" if part.change else times
        return f"{_words(replace(part, name=label(kernel.short_name)))} ({how})"

    item = terms(sides.a)[0]
    text = f"The same {item}s run equally often in both, and none is shown to be slower."
    if changed:
        text = f"What differs most: {named(changed, words)}."
    if parts[:1] != changed[:1] and parts[0].difference:
        text += f" Largest of all, though it may be chance: {words(parts[0])}."

    code = "parts" if changed else "parts same"
    return Finding(code=code, text=text, numbers=numbers_of(changed, 1e-9))


def _evidence(sides: Sides) -> Finding:
    """What A and B are."""
    texts = []
    for name, side in (("A", sides.a), ("B", sides.b)):
        steps = "no steps seen" if side.is_whole_trace else counted(side.num_steps, "step")
        words = [*map(label, (side.source, *side.device_names)), steps]
        texts.append(f"{name} is {', '.join(words)}")
    return Finding(code="evidence", text=f"{'; '.join(texts)}; one process of each.")


def _cautions(sides: Sides) -> list[Finding]:
    """What puts a file in doubt, and which kinds of steps only one has."""
    cautions, kinds = [], []
    for name, side in (("A", sides.a), ("B", sides.b)):
        kinds.append(", ".join(sorted(kind.name for kind in step_kinds(side))) or "not told apart")
        if side.doubts:
            text = f"{name} is in doubt: {'; '.join(side.doubts)}."
            cautions.append(Finding(code="doubt", text=text))
    if sides.a.device_names != sides.b.device_names:
        text = "The devices differ: what differs need not be the program's."
        cautions.append(Finding(code="devices", text=text))
    shown_by = [side.steps_from for side in (sides.a, sides.b)]
    if shown_by[0] != shown_by[1] and not sides.a.is_whole_trace:
        text = (
            f"A's steps are shown by {label(shown_by[0])}, B's by {label(shown_by[1])}: they need "
            "not be the same piece of work."
        )
        cautions.append(Finding(code="unlike steps", text=text))
    if kinds[0] != kinds[1]:
        text = f"Kinds of steps: in A {kinds[0]}; in B {kinds[1]}."
        cautions.append(Finding(code="kinds", text=text))
    return cautions
