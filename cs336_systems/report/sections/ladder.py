"""A ladder for people: a row of values for each rung, tables of speed, of the gate and of
counts, and a picture.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from ...analysis.compare import StepBlocks, Verdict, compare_in_turn, measured_steps
from ...analysis.kernels.step_profile import StepProfile, Work
from ...analysis.statistics import FEWEST
from ...analysis.warnings import in_doubt
from ...config import SETTINGS, Device, RunConfig
from ...record import RunRecord, Status
from ...studies.ceilings_files import NO_CEILINGS, Ceilings
from ...sweep.ladder import GATE_STEPS, Rung, judge, reason_run
from ..charts import Bar, Chart, Panel, Style
from ..columns import Row, column, columns_of, short
from ..formats import pngs_of, texts_of, write_files
from ..frame import RESULTS, codes_of, rows_of, to_frame
from ..identity import size_text
from ..section import Section, known, make_table
from ..words import CHANCE, DOUBT, STATUS_WORDS, ratio, significant
from .kernels.entry import Explained
from .steps import warning_notes
from .study import derived

Rows = Sequence[Row]
VERDICTS = {True: "passed", False: "FAILED", None: "no verdict"}
UNUSED = ("selective_checkpoints", "keep_hidden", "expandable_segments", "loss_chunks")
"""Shortcuts that no rung uses."""
FIELDS = (
    "batch_size",
    "precision",
    "compile",
    "compile_blocks",
    "optimizer",
    *(name for name, setting in SETTINGS.items() if setting.is_shortcut and name not in UNUSED),
    "learning_rate",
    "seed",
)
"""Settings that ladder.csv gives of each rung."""
TIMES = (
    "step_mean_ms",
    "step_std_ms",
    "step_ci95_low_ms",
    "step_ci95_high_ms",
    "tokens_per_s",
    "model_tflops_per_s",
    "mfu",
    "ceiling_share",
)
PREDICTED = ("predicted_step_ms", "predicted_step_error")
MEASURED = (
    "device_name",
    "status",
    "error",
    *TIMES,
    *PREDICTED,
    "peak_allocated_gib",
    "peak_reserved_gib",
    "warnings",
)
"""Columns of a sweep's results, over the rung's processes; None for a rung that has not run."""
COMPILED = ("graphs", "graph_breaks", "recompiles")
PROFILED = ("launches_per_step", "busy_ms", "busy_share")
SPEED_UPS = (
    "speed_up_over_last",
    "speed_up_over_last_ci95_low",
    "speed_up_over_last_ci95_high",
    "speed_up_over_first",
    "speed_up_over_first_ci95_low",
    "speed_up_over_first_ci95_high",
)
DISTANCES = (f"loss_{GATE_STEPS}", "distance_last", "distance_largest", "bound", "gate")
CSV_COLUMNS = (
    "rung",
    "change",
    "size",
    *FIELDS,
    "context_length",
    "vocab_size",
    "attention",
    "device_name",
    "status",
    "error",
    "processes",
    *TIMES,
    "last",
    *SPEED_UPS,
    "peak_allocated_gib",
    "peak_reserved_gib",
    "compile_s",
    *COMPILED,
    *DISTANCES,
    *PROFILED,
    "warnings",
    *PREDICTED,
)
SPEED = (
    column("rung"),
    column("change"),
    column("step_mean_ms", instead="ended"),
    column("step_ci95_low_ms"),
    column("predicted_step_ms", drop_order=5),
    column("predicted_step_error", drop_order=5),
    column("tokens_per_s"),
    column("mfu", drop_order=6),
    column("ceiling_share", drop_order=10),
    column("speed_up_over_last"),
    column("speed_up_over_last_ci95_low"),
    column("speed_up_over_first"),
    column("speed_up_over_first_ci95_low"),
    column("peak_allocated_gib", drop_order=4),
    column("gate"),
)
COUNTED = "Counts are of a run under torch.profiler; busy is over the step's time without it."
GATE = columns_of("rung", *DISTANCES, "compile_s", *COMPILED)
PASSED, UNCREDITED = "passed", "did not pass the gate"
STYLES = {
    PASSED: Style(colour="#0072B2"),
    UNCREDITED: Style(colour="#BBBBBB", pattern="/", ink="#000000"),
}


def ladder_rows(
    ladder: Sequence[Rung],
    records: Sequence[RunRecord],
    traces: Sequence[Explained],
    ceilings: Ceilings = NO_CEILINGS,
) -> list[Row]:
    """One row for each rung, in order, by the records of its configuration among `records`.

    A rung that fails its gate, or has no verdict, is not credited. Each rung is compared with the
    last credited rung before it, whose name is `last`, and with the first.
    """
    references = [
        each.losses for each in _records_of(ladder[0].config, records) if each.status is Status.OK
    ]
    measured: dict[RunConfig, Row] = {}
    for row in rows_of(to_frame(records, ceilings)):
        measured.setdefault(row["config"], row)
    rows: list[Row] = []
    blocks: dict[str, StepBlocks] = {}
    for rung in ladder:
        own = _records_of(rung.config, records)
        done = [record for record in own if record.status is Status.OK]
        frame = measured.get(rung.config.configuration, dict.fromkeys(RESULTS))
        gate = judge(
            rung.config.precision,
            [record.losses for record in done],
            references,
            fp8=rung.config.fp8,
        )
        blocks[rung.name] = measured_steps(own)
        credited = [row for row in rows if row["is_credited"]]
        row = {
            **_settings(rung),
            **{name: frame[name] for name in MEASURED},
            "ended": "not run"
            if frame["status"] is None
            else STATUS_WORDS[Status(frame["status"])],
            "cv": frame["step_cv"],
            "is_doubted": in_doubt(codes_of(frame)),
            "processes": len(done),
            "is_credited": bool(done) and gate.passed is True,
            "last": credited[-1]["rung"] if credited else "",
            "gate": VERDICTS[gate.passed] if done else "",
            "no_verdict": gate.missing,
            f"loss_{GATE_STEPS}": gate.loss,
            "distance_last": gate.last,
            "distance_largest": gate.largest,
            "bound": gate.bound,
            **_compiled(done),
            **_profiled(rung, traces, frame["step_mean_ms"]),
        }
        row |= _over("speed_up_over_last", credited[-1:], row, blocks)
        row |= _over("speed_up_over_first", credited[:1], row, blocks)
        rows.append(row)
    best = fastest_row(rows)
    for row in rows:
        row["may_be_fastest"] = (
            best is not None
            and row["is_credited"]
            and (
                compare_in_turn(blocks[row["rung"]], blocks[best["rung"]]).verdict
                is Verdict.CANNOT_TELL
            )
        )
    return rows


def fastest_row(rows: Rows) -> Row | None:
    """The credited rung with the shortest step; None where there is none."""
    return min(
        (row for row in rows if row["is_credited"]),
        key=lambda row: float(row["step_mean_ms"]),
        default=None,
    )


def _settings(rung: Rung) -> Row:
    config = rung.config
    return {
        "rung": rung.name,
        "change": rung.change,
        "config": config,
        "size": size_text(config),
        **{name: getattr(config, name) for name in FIELDS},
        "context_length": config.model.context_length,
        "vocab_size": config.model.vocab_size,
        "attention": None
        if config.model_factory
        else f"{config.model.attention}-{config.model.sdpa_backend}",
    }


def _compiled(done: Sequence[RunRecord]) -> Row:
    """The longest compilation, of the process that found least in the compiler's cache; the
    largest of all counts.
    """
    found = [record.compilation for record in done if record.compilation is not None]
    counts = {
        name: max((int(getattr(each, name)) for each in found), default=None) for name in COMPILED
    }
    return {"compile_s": max((each.seconds for each in found), default=None), **counts}


def _over(key: str, slower: Rows, row: Row, blocks: Mapping[str, StepBlocks]) -> Row:
    """The speed-up over the other rung, if there is one, with its interval and what puts it in
    doubt.
    """
    found = speed_up(blocks[slower[0]["rung"]], blocks[row["rung"]]) if slower else None
    times, low, high = found or (None, None, None)
    return {**derived(key, times, *slower, row), f"{key}_ci95_low": low, f"{key}_ci95_high": high}


def speed_up(slow: StepBlocks, fast: StepBlocks) -> tuple[float, float | None, float | None] | None:
    """The speed-up and its interval, from the processes of both sides; None if a side has none.

    Both are those of `cs336 compare`, inverted; there is no interval without FEWEST processes,
    which show the scatter.
    """
    if not slow or not fast:
        return None
    found = compare_in_turn(slow, fast)
    ends = (None, None) if len(slow.keys() & fast.keys()) < FEWEST else (found.high, found.low)
    low, high = (None if end is None else 1 / end for end in ends)
    return 1 / found.ratio, low, high


def _records_of(config: RunConfig, records: Sequence[RunRecord]) -> list[RunRecord]:
    found = [record for record in records if record.config.configuration == config.configuration]
    return sorted(found, key=lambda record: record.config.repeat)


def _profiled(rung: Rung, profiles: Sequence[Explained], step_ms: float | None) -> Row:
    """Counts of the rung's last profile, beside the mean step without a profiler; None for what is
    not known.

    `busy_share` is over the plain step: a profiler slows the host, not the kernels. It is at most
    1, and unknown on a CPU.
    """
    found = [entry.profile for entry in profiles if entry.config == reason_run(rung)]
    if not found or not found[-1].num_steps:
        return dict.fromkeys(PROFILED)
    row = counts_of(found[-1])
    share = None if found[-1].work is Work.OPERATORS else ratio(row["busy_ms"], step_ms)
    return {**row, "busy_share": None if share is None else min(1.0, share)}


def counts_of(profile: StepProfile) -> Row:
    """Sums over the profile, per step: kernels (on a CPU operators), and busy time."""
    return {
        "launches_per_step": sum(sum(phase.launches) for phase in profile.phases)
        / profile.num_steps,
        "busy_ms": sum(sum(phase.busy_s) for phase in profile.phases) / profile.num_steps * 1e3,
    }


def ladder_section(rows: Rows) -> Section:
    """Speed; gate and compilation; counts, if there is a profile."""
    tables = [
        make_table(
            "From the slow way to the fast way",
            known(SPEED, rows),
            rows,
            [f"{settings(rows)}.", *_speed_notes(rows)],
            _stands_out,
            findings(rows),
        ),
        make_table(
            "The same training, and what compiling takes",
            known(GATE, rows),
            rows,
            _gate_notes(rows),
            _stands_out,
        ),
    ]
    if any(row["launches_per_step"] is not None for row in rows):
        on_cpu = rows[0]["config"].device is Device.CPU
        counts = [
            column("rung"),
            column("launches_per_step", name="operators" if on_cpu else "kernels"),
            column("busy_share", write=short, scale=100),
            *([] if on_cpu else [column("busy_ms")]),
        ]
        tables.append(make_table("Counts of a step", known(counts, rows), rows, [COUNTED]))
    chart = ladder_chart(rows, settings(rows))
    return Section(
        name="ladder", tables=tuple(tables), rows=rows, keys=CSV_COLUMNS, pictures=(chart,)
    )


def _stands_out(row: Row) -> bool:
    return not row["is_credited"]


def _speed_notes(rows: Rows) -> Iterator[str]:
    """How many processes there are, which rung is the fastest, and what went wrong."""
    counts = sorted({row["processes"] for row in rows if row["processes"]})
    if counts and counts[0] < FEWEST:
        yield CHANCE
    yield from findings(rows)
    yield from warning_notes([row["warnings"] for row in rows], "rungs")
    if any(row["speed_up_over_first"] and row["speed_up_over_first_is_doubted"] for row in rows):
        yield (
            f"{DOUBT} marks a speed-up of times that are in doubt, with its deviation where "
            "there is no interval."
        )
    yield from (f"{row['rung']}: {row['error']}" for row in rows if row["error"])


def findings(rows: Rows) -> Iterator[str]:
    """Which rung is the fastest, and which are not credited."""
    first, best = next((row for row in rows if row["is_credited"]), None), fastest_row(rows)
    if first is not None and best is not None:
        times = column("speed_up_over_first").cell(best)
        gain = f", {times} times as fast as {first['rung']}" if times else ""
        alike = [row["rung"] for row in rows if row["may_be_fastest"] and row is not best]
        untold = f"; its processes do not tell it from {', '.join(alike)}" if alike else ""
        yield (
            f"The fastest is {best['rung']}: {significant(best['step_mean_ms'])} ms{gain}{untold}."
        )
    if failed := [row["rung"] for row in rows if row["processes"] and not row["is_credited"]]:
        yield f"Not credited, so no measure for others: {', '.join(failed)}."


def _gate_notes(rows: Rows) -> Iterator[str]:
    """What the losses are compared with, and why verdicts are missing."""
    yield (
        f"Losses of the first {GATE_STEPS} steps, on the same data from the same weights: their "
        "distance from those of the first rung, at the last step and at the worst, as a share of "
        "how far these fall. Of several processes the worst counts."
    )
    missing = {row["no_verdict"] for row in rows if row["processes"] and row["no_verdict"]}
    yield from (f"No verdict where {reason}." for reason in sorted(missing))


def write_ladder_report(rows: Rows, directory: Path, formats: Collection[str] = ()) -> list[Path]:
    """Write ladder.csv, .md and the other `formats`, and plots/ladder.png; return their paths."""
    section = ladder_section(rows)
    return write_files({**texts_of(section), **pngs_of(section)}, directory, formats)


def settings(rows: Rows) -> str:
    """What all rungs share, in words."""
    config = rows[0]["config"]
    device = next((row["device_name"] for row in rows if row["device_name"]), None)
    name = config.model_factory or config.size
    words = [
        name,
        f"context {config.model.context_length}",
        f"batch {config.batch_size}",
        f"seed {config.seed}",
    ]
    words += [f"learning rate {config.learning_rate:g}", f"tokens {config.tokens or 'random'}"]
    return ", ".join([*words, *([device] if device else [])])


def ladder_chart(rows: Rows, settings: str) -> Chart:
    """Mean time of a step by rung."""
    panel = Panel(label="step (ms)", bars=[_bar(row) for row in rows])
    return Chart(
        name="ladder",
        title="Time of a training step, rung by rung",
        settings=settings,
        panels=[panel],
        styles=STYLES,
    )


def _bar(row: Row) -> Bar:
    mean_ms = row["step_mean_ms"]
    if mean_ms is None:
        return Bar(name=row["rung"], failure=row["ended"])
    gain = ""
    if row["speed_up_over_first"] is not None and row["is_credited"]:
        doubt = f" {DOUBT}" if row["speed_up_over_first_is_doubted"] else ""
        gain = f", {significant(row['speed_up_over_first'], 3)}x{doubt}"
    part = PASSED if row["is_credited"] else UNCREDITED
    return Bar(name=row["rung"], parts={part: mean_ms}, words=f"{significant(mean_ms, 3)} ms{gain}")
