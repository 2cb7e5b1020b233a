"""Two explained traces side by side: the step, and its parts by phase, class, module and kernel.

The step of both files is compared by the times of their steps, as two sweeps are: one process each
shows little, so that a difference is only said to be one where it is beyond what processes and
steps scatter.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ....analysis.compare import CONFIDENCE, Comparison, Verdict, compare_apart, compare_launches
from ....analysis.difference import Amount, Change, Part, parts_of, with_rest
from ....analysis.kernels.step_profile import KernelTimes, StepProfile, Work
from ....config import Phase
from ....record import Measurement
from ....text import counted
from ...difference import MS, Difference, came_and_went, difference_section, named
from ...section import Finding, Section
from ...words import count, label, percent_of
from .figures import ms
from .files import collapsed
from .kinds import StepKind, step_kinds, wall_by_step_s
from .sums import grouped, kernel_s, path_text, terms, wall_s

BESIDE = "run beside others, counted twice above"
"""Name of what kernels, copies and idle times have beyond the step, as several streams or devices
run at once.
"""
NOTHING_RUNS = "no operator runs"
NOT_LISTED = "in no row"


def compared_traces(a: StepProfile, b: StepProfile, top: int) -> Difference:
    """Both traces side by side; raise ValueError, in one line, where they cannot be compared."""
    _refuse_unlike(a, b)
    sides = Sides(a, b)
    sections = [
        sides.section("phases", "Phases", sides.phases, top),
        *(sides.kind_section(pair, top) for pair in sides.kinds),
        sides.section("classes", "What the step consists of", sides.contents, top),
        sides.section("modules", "Modules", sides.modules, top),
        sides.section("kernels", f"{sides.item.capitalize()}s", sides.kernels, top),
    ]
    return Difference(findings=[*_answer(sides), *_cautions(sides)], sections=sections)


def _refuse_unlike(a: StepProfile, b: StepProfile) -> None:
    """Raise ValueError for operators against kernels, and a step against a file without steps."""
    if a.work is not b.work:
        words = [f"{name} lists {_listed(side)}" for name, side in (("A", a), ("B", b))]
        raise ValueError(f"{' and '.join(words)}: compare traces of the same kind of device")
    if a.is_whole_trace is not b.is_whole_trace:
        name, other = ("A", "B") if a.is_whole_trace else ("B", "A")
        raise ValueError(
            f"{name} shows no steps and {other} does: a whole file is no step; record both with a "
            "range around each step"
        )


def _listed(profile: StepProfile) -> str:
    if profile.work is Work.OPERATORS:
        return "a CPU's operators"
    return "a GPU's kernels"


def ns(time_s: float) -> int:
    """The time in whole nanoseconds."""
    return round(time_s * 1e9)


@dataclass(frozen=True)
class Sides:
    """Both profiles, with the parts of their steps."""

    a: StepProfile
    b: StepProfile

    @property
    def steps(self) -> tuple[int, int]:
        """The number of steps of each."""
        return self.a.num_steps, self.b.num_steps

    @property
    def item(self) -> str:
        """What the files list: `kernel` or `operator`."""
        return terms(self.a)[0]

    def parts(self, amounts_of: Callable[[StepProfile], Mapping[str, Amount]]) -> list[Part]:
        """The parts of both that `amounts_of` tells of one."""
        return parts_of(amounts_of(self.a), amounts_of(self.b), self.steps)

    def section(self, name: str, title: str, parts: Sequence[Part], top: int) -> Section:
        """The parts as a section."""
        return difference_section(name, f"{title}, per step", parts, MS, top)

    @cached_property
    def step(self) -> Comparison | None:
        """The steps' times on the device compared; None where a file shows none."""
        return _compared(*map(wall_by_step_s, (self.a, self.b)))

    @cached_property
    def phases(self) -> list[Part]:
        """The phases, each slower or faster if its times in the steps show it."""
        parts = self.parts(phase_amounts)
        walls_s = [_walls_s(side) for side in (self.a, self.b)]
        judged = []
        for part in parts:
            compared = _compared(*(of_side.get(part.name, ()) for of_side in walls_s))
            judged.append(_with_verdict(part, compared))
        return judged

    @cached_property
    def contents(self) -> list[Part]:
        """Classes, copies and idle times by cause; they add up to the step."""
        names = {*idle_amounts(self.a), *idle_amounts(self.b), BESIDE, NOTHING_RUNS}
        parts = []
        for part in self.parts(content_amounts):
            parts.append(self._by_step(part) if part.name in names else part)
        return parts

    @cached_property
    def modules(self) -> list[Part]:
        """The modules, with one row for all blocks; they add up to the kernels."""
        return self.parts(module_amounts)

    @cached_property
    def kernels(self) -> list[Part]:
        """The kernels, each slower or faster if its launches show it."""
        of_a, of_b = kernels_of(self.a), kernels_of(self.b)
        among = max(len(of_a.keys() & of_b.keys()), 1)
        parts = []
        for part in self.parts(kernel_amounts):
            a, b = of_a.get(part.name), of_b.get(part.name)
            if a and b and a.mean_s and b.mean_s and part.change is Change.NONE:
                part = _with_verdict(part, compare_launches(a, b, among))
            parts.append(part)
        return parts

    @cached_property
    def causes(self) -> list[Part]:
        """The finest parts of the step: kernels, copies and idle times by cause."""
        idle = map(self._by_step, self.parts(idle_amounts))
        parts = [*self.kernels, *self.parts(copy_amounts), *idle]
        return sorted(parts, key=lambda part: -abs(part.difference))

    def _by_step(self, part: Part) -> Part:
        """Idle time of one cause, longer or shorter where it differs by more than whole steps
        scatter. The profile has no times of single steps for it, and its count is chance.
        """
        whole_ns = wall_s(self.a) / self.a.num_steps * 1e9
        least = None if self.step is None else self.step.least_shown
        change = Change.NONE
        if least is not None and abs(part.difference) > least * whole_ns:
            change = Change.LONGER if part.difference > 0 else Change.SHORTER
        return replace(part, change=change)

    def cause_words(self, part: Part) -> str:
        """The part with its difference, and for a kernel how it differs."""
        kernel = kernels_of(self.b).get(part.name) or kernels_of(self.a).get(part.name)
        if kernel is None:
            return f"{part.name} {_signed(part)}"
        a, b = part.a.count / part.steps_a, part.b.count / part.steps_b
        how = f"{part.change}, {count(max(a, b))} in a step"
        if part.change in (Change.MORE, Change.FEWER):
            how = f"{count(a)} to {count(b)} in a step"
        return f"{label(kernel.short_name)} {_signed(part)} ({how})"

    @cached_property
    def kinds(self) -> list[tuple[StepKind, StepKind]]:
        """The kinds of steps that both have; none where either tells no kinds apart."""
        of_a, of_b = ({kind.name: kind for kind in step_kinds(side)} for side in (self.a, self.b))
        return [(kind, of_b[name]) for name, kind in of_a.items() if name in of_b]

    @property
    def have_same_kinds(self) -> bool:
        """Whether the means over all steps are of the same kinds of steps in the same shares."""
        shares = []
        for side in (self.a, self.b):
            kinds = step_kinds(side)
            shares.append({kind.name: len(kind.steps) / side.num_steps for kind in kinds})
        has_one = all(len(of_side) < 2 for of_side in shares)
        return has_one or shares[0] == shares[1]

    def kind_section(self, pair: tuple[StepKind, StepKind], top: int) -> Section:
        """The phases of the steps of one kind."""
        parts = parts_of(
            phase_amounts(self.a, pair[0]),
            phase_amounts(self.b, pair[1]),
            (len(pair[0].steps), len(pair[1].steps)),
        )
        name = pair[0].name
        return self.section(f"phases_{'_'.join(name.split())}", f"Phases of {name}", parts, top)


def phase_amounts(profile: StepProfile, kind: StepKind | None = None) -> dict[str, Amount]:
    """Wall time and kernels of each phase, over the steps of one kind or over all."""
    amounts = {}
    for times in profile.phases:
        walls_s, launches = times.wall_s, times.launches
        if kind is not None:
            walls_s = tuple(walls_s[step] for step in kind.steps)
            launches = tuple(launches[step] for step in kind.steps)
        if any(walls_s) or any(launches):
            amounts[str(times.phase)] = Amount(sum(launches), sum(map(ns, walls_s)))
    return amounts


def content_amounts(profile: StepProfile) -> dict[str, Amount]:
    """Classes of kernels, copies by kind, idle times by cause, and what all of these have beyond
    the step.
    """
    classes = grouped(profile.classes, lambda row: row.kind)
    amounts = {str(kind): Amount(part.count, ns(part.total_s)) for kind, part in classes.items()}
    whole = sum(amount.total for amount in phase_amounts(profile).values())
    rest = NOTHING_RUNS if profile.work is Work.OPERATORS else BESIDE
    return with_rest(amounts | copy_amounts(profile) | idle_amounts(profile), whole, rest)


def copy_amounts(profile: StepProfile) -> dict[str, Amount]:
    """Copies and fills by kind."""
    kinds = [row for row in profile.copies if row.kind is not None]
    return {f"copies, {row.kind}": Amount(row.count, ns(row.total_s)) for row in kinds}


def idle_amounts(profile: StepProfile) -> dict[str, Amount]:
    """Idle times by cause."""
    causes = grouped(profile.idle, lambda row: row.cause)
    return {
        f"idle, {cause}": Amount(part.count, ns(part.total_s)) for cause, part in causes.items()
    }


def module_amounts(profile: StepProfile) -> dict[str, Amount]:
    """Kernels of each module without those of its own modules."""
    paths = grouped(profile.modules, lambda row: path_text(collapsed(row.path), cut=False))
    amounts = {path: Amount(part.count, ns(part.total_s)) for path, part in paths.items()}
    return with_rest(amounts, ns(kernel_s(profile)), NOT_LISTED)


def kernels_of(profile: StepProfile) -> dict[str, KernelTimes]:
    """The kernels of the whole step by name."""
    return {kernel.name: kernel for kernel in profile.kernels if kernel.phase is None}


def kernel_amounts(profile: StepProfile) -> dict[str, Amount]:
    """The kernels of the whole step."""
    of_step = [kernel for kernel in profile.kernels if kernel.phase is None]
    kernels = grouped(of_step, lambda row: row.name)
    amounts = {name: Amount(part.count, ns(part.total_s)) for name, part in kernels.items()}
    return with_rest(amounts, ns(kernel_s(profile)), NOT_LISTED)


def _compared(a_s: Sequence[float], b_s: Sequence[float]) -> Comparison | None:
    """The times of steps of one process each compared; None where one of them has none."""
    if not sum(a_s) or not sum(b_s):
        return None
    a, b = (Measurement(phase=Phase.STEP, times_s=tuple(side)) for side in (a_s, b_s))
    return compare_apart({0: a}, {0: b})


def _walls_s(profile: StepProfile) -> dict[str, tuple[float, ...]]:
    """The wall times of each phase."""
    return {str(times.phase): times.wall_s for times in profile.phases}


def _with_verdict(part: Part, compared: Comparison | None) -> Part:
    if part.change in (Change.ONLY_A, Change.ONLY_B):
        return part
    verdict = Verdict.CANNOT_TELL if compared is None else compared.verdict
    if verdict is Verdict.CANNOT_TELL:
        return part
    return replace(part, change=Change(verdict.value))


def _answer(sides: Sides) -> list[Finding]:
    """Whether the step differs, in what, and what this rests on."""
    return [_step_finding(sides), _causes_finding(sides), _evidence(sides)]


def _step_finding(sides: Sides) -> Finding:
    """By how much the step differs; of steps of several kinds, those of each kind."""
    walls_s = wall_by_step_s(sides.a), wall_by_step_s(sides.b)
    numbers = _step_numbers("", *walls_s)
    if not sides.kinds:
        code, text = _step_words("step", sides.step, *walls_s)
        numbers |= _numbers(sides.phases)
        phases = named(sides.phases, lambda part: f"{part.name} {_signed(part)}")
        if code != "same" and phases:
            text += f": {phases}"
        return Finding(code=f"step {code}", text=f"{text}.", numbers=numbers)
    texts, codes = [], []
    for a, b in sides.kinds:
        of_kind = a.of(walls_s[0]), b.of(walls_s[1])
        code, text = _step_words(f"step of {a.name}", _compared(*of_kind), *of_kind)
        numbers |= _step_numbers(f"{a.name} ", *of_kind)
        codes.append(code)
        texts.append(text)
    return Finding(code=f"steps {', '.join(codes)}", text=f"{'; '.join(texts)}.", numbers=numbers)


def _step_numbers(prefix: str, a_s: Sequence[float], b_s: Sequence[float]) -> dict[str, float]:
    """The mean times of the steps by name."""
    a, b = _mean(a_s), _mean(b_s)
    return {f"{prefix}a_step_s": a, f"{prefix}b_step_s": b, f"{prefix}difference_s": b - a}


def _mean(times_s: Sequence[float]) -> float:
    return sum(times_s) / max(len(times_s), 1)


def _step_words(
    what: str, compared: Comparison | None, a_s: Sequence[float], b_s: Sequence[float]
) -> tuple[str, str]:
    """Whether B's is longer as one word, and in words with the times."""
    a, b = _mean(a_s), _mean(b_s)
    if compared is None:
        return "not seen", f"No time of a {what} is seen on the device ({ms(a)} and {ms(b)})"
    by = f"{ms(abs(b - a))} ({percent_of(abs(b - a), a)})"
    way = "longer" if b > a else "shorter"
    times = f"{ms(a)} in A, {ms(b)} in B"
    if compared.verdict is not Verdict.CANNOT_TELL:
        return way, f"B's {what} is {by} {way} ({times})"
    if compared.least_shown is None and a != b:
        few = " and ".join(name for name, side in (("A", a_s), ("B", b_s)) if len(side) < 2)
        text = (
            f"B's {what} is {by} {way} in these files ({times}), and a single one of {few} is no "
            "proof"
        )
        return "no proof", text
    text = f"B's {what} is not shown to differ: {times}"
    if compared.least_shown is not None:
        text += f"; below {percent_of(compared.least_shown)} may be chance"
    return "same", text


def _signed(part: Part) -> str:
    """The difference of the part with its sign, in ms."""
    difference = float(part.difference) / 1e9
    return f"{'-' if difference < 0 else '+'}{ms(abs(difference))}"


def _causes_finding(sides: Sides) -> Finding:
    """The kernels, copies and idle times that differ by more than chance, the largest first."""
    item = sides.item
    if not sides.have_same_kinds:
        text = (
            f"{item.capitalize()}s are not compared here: A and B have unequal shares of the kinds "
            "of steps, and the tables below are means over all kinds."
        )
        return Finding(code="parts not compared", text=text)
    changed = [part for part in sides.causes if part.change is not Change.NONE]
    if not changed:
        text = (
            f"The same {item}s run equally often in both; none, no copy and no idle time is "
            "shown to be longer or shorter."
        )
        return Finding(code="parts same", text=text)
    text = f"What differs most: {named(changed, sides.cause_words)}"
    for change, number in came_and_went(sides.kernels).items():
        text += f"; {counted(number, item)} {change}" if number else ""
    return Finding(code="parts", text=f"{text}.", numbers=_numbers(changed))


def _numbers(parts: Sequence[Part]) -> dict[str, float]:
    """The differences of the parts by name, in seconds per step."""
    return {part.name: float(part.difference) / 1e9 for part in parts if part.difference}


def _evidence(sides: Sides) -> Finding:
    """What A and B are, and what a comparison of one process each can show."""
    texts = []
    for name, side in (("A", sides.a), ("B", sides.b)):
        steps = "no steps seen" if side.is_whole_trace else counted(side.num_steps, "step")
        texts.append(
            f"{name} is {', '.join([*map(label, (side.source, *side.device_names)), steps])}"
        )
    text = f"{'; '.join(texts)}."
    least = None if sides.step is None else sides.step.least_shown
    if least is not None and not sides.kinds:
        text += (
            f" One process of each: a difference of the step below {percent_of(least)} would not "
            f"show ({100 * CONFIDENCE:g} %)."
        )
    return Finding(
        code="evidence",
        text=text,
        numbers={"a_steps": sides.a.num_steps, "b_steps": sides.b.num_steps},
    )


def _cautions(sides: Sides) -> list[Finding]:
    """What puts the files in doubt, and in what the work of their steps is not the same."""
    texts = []
    for name, side in (("A", sides.a), ("B", sides.b)):
        if side.doubts:
            texts.append(f"{name} is in doubt: {'; '.join(side.doubts)}.")
        if side.is_warmup:
            texts.append(f"{name} has only warm-up steps.")
    passes = sides.a.passes_per_step, sides.b.passes_per_step
    if None not in passes and passes[0] != passes[1]:
        texts.append(
            f"A step is other work: {passes[0]} passes of backward in one of A, {passes[1]} in B."
        )
    kinds = [[kind.name for kind in step_kinds(side)] for side in (sides.a, sides.b)]
    if set(kinds[0]) != set(kinds[1]):
        words = [", ".join(names) or "no kinds told apart" for names in kinds]
        texts.append(f"Kinds of steps: in A {words[0]}; in B {words[1]}.")
    return [Finding(code="caution", text=text) for text in texts]
