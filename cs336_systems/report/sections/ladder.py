"""A ladder for people: the result of each rung, tables of speed, of the gate and of counts, and a
picture.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from ...analysis.compare import StepBlocks, Verdict, compare_in_turn, measured_steps
from ...analysis.kernels.step_profile import StepProfile, Work
from ...analysis.statistics import FEWEST
from ...config import SETTINGS, Device, RunConfig
from ...record import Compilation, RunRecord, Status
from ...studies.ceilings_files import NO_CEILINGS, Ceilings
from ...subject import Subject
from ...sweep.ladder import CHANGED, GATE_STEPS, Gate, Rung, judge, reason_run
from ..charts import Bar, Chart, Panel, Style
from ..column import Column, quantity, short, six_digits
from ..configurations import step_results
from ..formats import pngs_of, texts_of, write_files
from ..quantities import Gain, OtherColumns, StepResult, Value
from ..section import Section, known, make_table
from ..words import CHANCE, DOUBT, mixed_notes, ratio, rounded, significant
from .kernels.entry import Explained
from .kernels.sums import busy_s, num_launches
from .steps import warning_notes

VERDICTS = {True: "passed", False: "FAILED", None: "no verdict"}
_OF_RUNGS = [
    name
    for name, setting in SETTINGS.items()
    # what no flag asks for is in records of earlier versions
    if setting.is_shortcut and (name in CHANGED or not setting.help)
]
SETTINGS_OF_RUNGS = list(
    dict.fromkeys(
        (
            "batch_size",
            "precision",
            "compile",
            "compile_blocks",
            "optimizer",
            *_OF_RUNGS,
            "learning_rate",
            "seed",
        )
    )
)
"""Settings that ladder.csv gives of each rung."""
LEAST_DISTANCE = 0.001
"""Smallest distance between losses that is written as a number, in percent of the fall of the
loss.
"""
COUNTED = "Counts are of a run under torch.profiler"
PASSED, UNCREDITED = "passed", "did not pass the gate"
STYLES = {
    PASSED: Style(colour="#0072B2"),
    UNCREDITED: Style(colour="#BBBBBB", pattern="/", ink="#000000"),
}


def distance_text(percent: float) -> str:
    """To two significant digits; a distance below LEAST_DISTANCE, which is far below every
    bound, as `< 0.001`.
    """
    if 0 < percent < LEAST_DISTANCE:
        return f"< {LEAST_DISTANCE:g}"
    return significant(percent, 2) if percent else "0"


class RungResult(StepResult):
    """The result of a rung: its times, its gate, and how much faster it is than others.

    A rung that fails its gate, or has no verdict, is not credited.
    """

    config: RunConfig
    before: "RungResult | None" = None
    """The last credited rung before this one."""
    first: "RungResult | None" = None
    """The first credited rung before this one."""

    def __init__(
        self,
        rung: Rung,
        records: Sequence[RunRecord],
        ceilings: Ceilings,
        references: Sequence[Sequence[float | None]],
        profile: StepProfile | None,
    ) -> None:
        """Results of one rung from its `records`; `references` are the losses of the first rung's
        processes, to which its own are compared.
        """
        super().__init__(rung.config.configuration, records, ceilings)
        self._rung, self._profile = rung, profile
        config = rung.config
        losses = [record.losses for record in self.done]
        self.verdict: Gate = judge(config.precision, losses, references, fp8=config.fp8)
        self.is_credited = bool(self.done) and self.verdict.passed is True
        # ladder.csv has the settings as they are, not as the columns of sweeps combine them
        self.identity |= {name: getattr(config, name) for name in SETTINGS_OF_RUNGS}
        self.identity["vocab_size"] = config.model.vocab_size
        if config.model_factory is None:
            model = config.model
            self.identity["attention"] = f"{model.attention}-{model.sdpa_backend}"

    @cached_property
    def blocks(self) -> StepBlocks:
        """The times of the processes, by repeat."""
        return measured_steps(self.records)

    @cached_property
    def compilations(self) -> list[Compilation]:
        """What each process compiled."""
        return [record.compilation for record in self.done if record.compilation is not None]

    @cached_property
    def over_last(self) -> Gain:
        """How many times faster this rung is than the last rung before it that passed its gate;
        unknown if none did.
        """
        return _gain(self.before, self)

    @cached_property
    def over_first(self) -> Gain:
        """How many times faster this rung is than the first rung that passed its gate; unknown if
        none before this one did.
        """
        return _gain(self.first, self)

    # columns of ladder.csv, which the tables show too

    @quantity("rung", numeric=False, write=str)
    def rung(self) -> str:
        """Name of the rung."""
        return self._rung.name

    @quantity("change", numeric=False, write=str, drop_order=5)
    def change(self) -> str:
        """What sets the rung apart from the one before."""
        return self._rung.change

    _of_the_run = OtherColumns(
        "size",
        *SETTINGS_OF_RUNGS,
        "context_length",
        "vocab_size",
        "attention",
        "device_name",
        "status",
        "error",
        "processes",
    )
    _times = OtherColumns(
        "step_mean_ms",
        "step_std_ms",
        "step_ci95_low_ms",
        "step_ci95_high_ms",
        "tokens_per_s",
        "model_tflops_per_s",
        "mfu",
        "ceiling_share",
    )

    @quantity("over", numeric=False, write=str)
    def last(self) -> str:
        """The rung that this one is compared with."""
        return self.before.rung if self.before is not None else ""

    @quantity("over last", drop_order=2, text=lambda rung: rung.over_last.text())
    def speed_up_over_last(self) -> Value:
        """How many times faster than the last rung that counts."""
        return self.over_last.ratio

    @quantity("interval", numeric=False, drop_order=8, text=lambda rung: rung.over_last.interval())
    def speed_up_over_last_ci95_low(self) -> Value:
        """Interval of the speed-up beside it."""
        return self.over_last.low

    @quantity()
    def speed_up_over_last_ci95_high(self) -> Value:
        """Upper end of the interval."""
        return self.over_last.high

    @quantity("over first", drop_order=3, text=lambda rung: rung.over_first.text())
    def speed_up_over_first(self) -> Value:
        """How many times faster than the first rung that counts."""
        return self.over_first.ratio

    @quantity("interval", numeric=False, drop_order=7, text=lambda rung: rung.over_first.interval())
    def speed_up_over_first_ci95_low(self) -> Value:
        """Interval of the speed-up beside it."""
        return self.over_first.low

    @quantity()
    def speed_up_over_first_ci95_high(self) -> Value:
        """Upper end of the interval."""
        return self.over_first.high

    _peaks = OtherColumns("peak_allocated_gib", "peak_reserved_gib")

    @quantity("compiling", "s", drop_order=2, write=short)
    def compile_s(self) -> Value:
        """The longest compilation of its processes."""
        # the process that found least in the compiler's cache
        return max((compilation.seconds for compilation in self.compilations), default=None)

    @quantity("graphs", drop_order=6, write=str)
    def graphs(self) -> int | None:
        """Graphs that were compiled."""
        return max((made.graphs for made in self.compilations), default=None)

    @quantity("graph breaks", drop_order=7, write=str)
    def graph_breaks(self) -> int | None:
        """Places where the compiler gave up a graph."""
        return max((made.graph_breaks for made in self.compilations), default=None)

    @quantity("recompiles", drop_order=8, write=str)
    def recompiles(self) -> int | None:
        """Graphs that were compiled again."""
        return max((made.recompiles for made in self.compilations), default=None)

    @quantity("loss 20", drop_order=5, write=six_digits)
    def loss_20(self) -> Value:
        """Loss at the last of the steps that are compared."""
        return self.verdict.loss

    @quantity("distance", "% of the fall", drop_order=1, scale=100, write=distance_text)
    def distance_last(self) -> Value:
        """Distance from the first rung's loss at the last step."""
        return self.verdict.last

    @quantity("largest", "% of the fall", drop_order=3, scale=100, write=distance_text)
    def distance_largest(self) -> Value:
        """Largest distance from the first rung's losses."""
        return self.verdict.largest

    @quantity("bound", "% of the fall", drop_order=4, scale=100, write="{:g}".format)
    def bound(self) -> float:
        """Largest distance that passes."""
        return self.verdict.bound

    @quantity("gate", numeric=False, write=str)
    def gate(self) -> str:
        """Whether the rung computes what the first one does."""
        return VERDICTS[self.verdict.passed] if self.done else ""

    @quantity("kernels", write=short)
    def launches_per_step(self) -> Value:
        """Kernels that were launched in a step; on a CPU, operators."""
        if self._profile is None:
            return None
        return num_launches(*self._profile.phases) / self._profile.num_steps

    @quantity("busy", "ms", drop_order=1, write=rounded)
    def busy_ms(self) -> Value:
        """Time of a step in which a kernel or copy ran."""
        if self._profile is None:
            return None
        return busy_s(self._profile) / self._profile.num_steps * 1e3

    @quantity("GPU busy", "%", drop_order=2, scale=100, write=short)
    def busy_share(self) -> Value:
        """Part of the step without a profiler in which a kernel or copy ran.

        A profiler slows the host, not the kernels, so that it can be above 1, and 1 is written.
        """
        if self._profile is None or self._profile.work is Work.OPERATORS:
            return None
        share = ratio(self.busy_ms, self.step_mean_ms)
        return None if share is None else min(1.0, share)

    _others = OtherColumns("warnings", "predicted_step_ms", "predicted_step_error")


def _gain(slower: RungResult | None, faster: RungResult) -> Gain:
    """The gain over another rung, compared as `cs336 compare` does; all unknown without times of
    both on one device.

    There is no interval unless processes in turn show the scatter.
    """
    if slower is None or not slower.blocks or not faster.blocks:
        return Gain()
    if slower.device_name != faster.device_name:
        return Gain()
    compared = compare_in_turn(slower.blocks, faster.blocks)
    gain = Gain.over(slower, faster, 1 / compared.ratio)
    if not compared.is_in_turn or compared.low is None or compared.high is None:
        return gain
    return gain._replace(low=1 / compared.high, high=1 / compared.low)


Rungs = Sequence[RungResult]
SPEED = (
    "rung",
    "change",
    "step_mean_ms",
    "step_ci95_low_ms",
    "predicted_step_ms",
    "predicted_step_error",
    "tokens_per_s",
    "mfu",
    "ceiling_share",
    "speed_up_over_last",
    "speed_up_over_last_ci95_low",
    "speed_up_over_first",
    "speed_up_over_first_ci95_low",
    "peak_allocated_gib",
    "gate",
)
SPEED_CHANGES: Mapping[str, dict[str, Any]] = {
    "step_mean_ms": {"instead": "ended"},
    # no note explains a mark of doubt here
    "predicted_step_ms": {"drop_order": 5, "doubt": ""},
    "predicted_step_error": {"drop_order": 5, "doubt": ""},
    "mfu": {"drop_order": 6},
    "ceiling_share": {"drop_order": 10},
    "peak_allocated_gib": {"drop_order": 4},
}
"""What the table of speed writes in another way than that of a sweep."""
GATE = (
    "rung",
    "loss_20",
    "distance_last",
    "distance_largest",
    "bound",
    "gate",
    "compile_s",
    "graphs",
    "graph_breaks",
    "recompiles",
)


def ladder_results(
    ladder: Sequence[Rung],
    records: Sequence[RunRecord],
    traces: Sequence[Explained],
    ceilings: Ceilings = NO_CEILINGS,
) -> list[RungResult]:
    """The result of each rung, in order, by the records of its configuration among `records`.

    Each rung is compared with the last credited rung before it, and with the first.
    """
    records_of: dict[Subject, Sequence[RunRecord]] = {}
    for step in step_results(records, ceilings):
        records_of.setdefault(step.subject, step.records)
    references: list[Sequence[float | None]] = []
    rungs: list[RungResult] = []
    for rung in ladder:
        processes = records_of.get(rung.config.configuration, ())
        if not rungs:
            references = [record.losses for record in processes if record.status is Status.OK]
        profiles = [entry.profile for entry in traces if entry.config == reason_run(rung)]
        profile = profiles[-1] if profiles and profiles[-1].num_steps else None
        result = RungResult(rung, processes, ceilings, references, profile)
        credited = [earlier for earlier in rungs if earlier.is_credited]
        if credited:
            result.first, result.before = credited[0], credited[-1]
        rungs.append(result)
    return rungs


def fastest_rung(rungs: Rungs) -> RungResult | None:
    """The credited rung with the shortest step; None where there is none."""
    credited = [rung for rung in rungs if rung.is_credited]
    return min(credited, key=lambda rung: rung.step_mean_ms or math.inf, default=None)


def _column(key: str) -> Column:
    """The column of a rung's quantity."""
    column: Column = getattr(RungResult, key)
    return column


def ladder_section(rungs: Rungs) -> Section:
    """Speed; gate and compilation; counts, if there is a profile."""

    def is_uncredited(rung: RungResult) -> bool:
        """Whether the rung has no result or did not pass its gate."""
        return not rung.is_credited

    columns = [replace(_column(key), **SPEED_CHANGES.get(key, {})) for key in SPEED]
    speed = make_table(
        "From the slow way to the fast way",
        known(columns, rungs),
        rungs,
        _speed_notes(rungs),
        is_uncredited,
        findings(rungs),
    )
    columns = known([_column(key) for key in GATE], rungs)
    title = "The same training, and what compiling takes"
    tables = [speed, make_table(title, columns, rungs, _gate_notes(rungs), is_uncredited)]
    if any(rung.launches_per_step is not None for rung in rungs):
        counts: list[Column] = [RungResult.rung]
        if rungs[0].config.device is Device.CPU:
            counts += [replace(RungResult.launches_per_step, name="operators")]
            note = f"{COUNTED}."
        else:
            note = f"{COUNTED}; busy is over the step's time without it."
            counts += [RungResult.launches_per_step, RungResult.busy_share, RungResult.busy_ms]
        tables.append(make_table("Counts of a step", known(counts, rungs), rungs, [note]))
    return Section(
        name="ladder",
        tables=tuple(tables),
        rows=rungs,
        keys=RungResult.csv_keys(rungs),
        pictures=(ladder_chart(rungs),),
    )


def _speed_notes(rungs: Rungs) -> Iterator[str]:
    """What all rungs share, how many processes there are, which rung is the fastest, and what
    went wrong.
    """
    yield f"{settings(rungs)}."
    counts = [rung.processes for rung in rungs if rung.processes]
    if counts and min(counts) < FEWEST:
        yield CHANCE
    yield from mixed_notes(chain.from_iterable(rung.environments for rung in rungs))
    yield from findings(rungs)
    yield from warning_notes([rung.warnings for rung in rungs], "rungs")
    if any(rung.over_first.is_doubted for rung in rungs):
        yield (
            f"{DOUBT} marks a speed-up of times that are in doubt, with its deviation where "
            "there is no interval."
        )
    for rung in rungs:
        if rung.error:
            yield f"{rung.rung}: {rung.error}"


def findings(rungs: Rungs) -> Iterator[str]:
    """Which rung is the fastest, and which are not credited."""
    best = fastest_rung(rungs)
    if best is not None and best.step_mean_ms is not None:
        first = best.first
        gain = ""
        if first is not None and (times := best.over_first.text()):
            gain = f", {times} times as fast as {first.rung}"
        alike = []
        for rung in rungs:
            if rung is best or not rung.is_credited or not rung.blocks:
                continue
            if compare_in_turn(rung.blocks, best.blocks).verdict is Verdict.CANNOT_TELL:
                alike.append(rung.rung)
        untold = f"; as far as its processes tell, {', '.join(alike)} may be as fast"
        if not alike:
            untold = ""
        yield f"The fastest rung is {best.rung}: {significant(best.step_mean_ms)} ms{gain}{untold}."
    if failed := [rung.rung for rung in rungs if rung.processes and not rung.is_credited]:
        yield f"Not credited, so no measure for others: {', '.join(failed)}."


def _gate_notes(rungs: Rungs) -> Iterator[str]:
    """What the losses are compared with, and why verdicts are missing."""
    yield (
        f"Losses of the first {GATE_STEPS} steps, on the same data from the same weights: their "
        "distance from those of the first rung, at the last step and at the worst, as a share of "
        "how far these fall. Of several processes the worst counts."
    )
    missing = {rung.verdict.missing for rung in rungs if rung.processes} - {""}
    for reason in sorted(missing):
        yield f"No verdict where {reason}."


def write_ladder_report(rungs: Rungs, directory: Path, formats: Collection[str]) -> list[Path]:
    """Write ladder.csv, .md and the other `formats`, and plots/ladder.png; return their paths."""
    section = ladder_section(rungs)
    return write_files({**texts_of(section), **pngs_of(section)}, directory, formats)


def settings(rungs: Rungs) -> str:
    """What all rungs share, in words."""
    config = rungs[0].config
    words = [
        config.model_factory or config.size,
        f"context {config.model.context_length}",
        f"batch {config.batch_size}",
        f"seed {config.seed}",
        f"learning rate {config.learning_rate:g}",
        f"tokens {config.tokens or 'random'}",
    ]
    devices = dict.fromkeys(rung.device_name for rung in rungs if rung.device_name)
    return ", ".join([*words, *devices])


def ladder_chart(rungs: Rungs) -> Chart:
    """Mean time of a step by rung."""
    panel = Panel(label="step (ms)", bars=[_bar(rung) for rung in rungs])
    return Chart(
        name="ladder",
        title="Time of a training step, rung by rung",
        settings=settings(rungs),
        panels=[panel],
        styles=STYLES,
    )


def _bar(rung: RungResult) -> Bar:
    """The bar of one rung: mean time of a step, and how many times faster than the first rung it
    is.
    """
    mean_ms = rung.step_mean_ms
    if mean_ms is None:
        return Bar(name=rung.rung, failure=rung.ended)
    figures = [f"{significant(mean_ms, 3)} ms"]
    if rung.over_first.ratio is not None and rung.is_credited:
        doubt = f" {DOUBT}" if rung.over_first.is_doubted else ""
        figures.append(f"{significant(rung.over_first.ratio, 3)}x{doubt}")
    part = PASSED if rung.is_credited else UNCREDITED
    return Bar(name=rung.rung, parts={part: mean_ms}, figures=figures)
