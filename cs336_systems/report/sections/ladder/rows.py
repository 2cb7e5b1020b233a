"""Results of each rung of a ladder, as a row of values: times, speed-ups, gate, compilation, counts and bytes."""

from collections.abc import Mapping, Sequence

from cs336_systems.analysis.compare import compare, process_means
from cs336_systems.analysis.kernels.classes import KernelClass
from cs336_systems.analysis.kernels.step_profile import StepProfile, Work
from cs336_systems.analysis.warnings import in_doubt
from cs336_systems.config import SETTINGS, RunConfig
from cs336_systems.costs.traffic import traffic
from cs336_systems.record import RunRecord, Status
from cs336_systems.report.columns import Row
from cs336_systems.report.frame import RESULTS, codes_of, rows_of, to_frame
from cs336_systems.report.identity import size_text
from cs336_systems.report.sections.kernels.entries import Profiled
from cs336_systems.report.sections.study import derived
from cs336_systems.report.words import STATUS_WORDS, ratio
from cs336_systems.studies.ceilings_files import NO_CEILINGS, Ceilings
from cs336_systems.sweep.ladder import GATE_STEPS, Gate, Rung, judge, reason_run, reference

CONFIDENCE = 0.95
MAX_SLOWDOWN = 0.10
"""Largest profiler slowdown at which class times still explain the plain step."""
VERDICTS = {True: "passed", False: "FAILED", None: "no verdict"}
UNUSED = ("selective_checkpoints", "keep_hidden", "expandable_segments", "loss_chunks")
"""Shortcuts that no rung uses."""
FIELDS = ("batch_size", "precision", "compile", "compile_blocks", "optimizer",
          *(name for name, setting in SETTINGS.items() if setting.is_shortcut and name not in UNUSED), "learning_rate",
          "seed")  # fmt: skip
"""Settings that ladder.csv gives of each rung."""
TIMES = ("step_mean_ms", "step_std_ms", "step_ci95_low_ms", "step_ci95_high_ms", "tokens_per_s", "model_tflops_per_s",
         "mfu", "ceiling_share")  # fmt: skip
PREDICTED = ("predicted_step_ms", "predicted_step_error")
MEASURED = ("device_name", "status", "error", *TIMES, *PREDICTED, "peak_allocated_gib", "peak_reserved_gib", "warnings")
"""Columns of a sweep's results, over the rung's processes; None for a rung that has not run."""
COMPILED = ("graphs", "graph_breaks", "recompiles")
LEAST = ("weights", "casts", "optimizer", "activations", "state")


def ladder_rows(
    ladder: Sequence[Rung],
    records: Sequence[RunRecord],
    profiles: Sequence[Profiled],
    ceilings: Ceilings = NO_CEILINGS,
) -> list[Row]:
    """One row for each rung, in order, by the records of its configuration among `records`.

    A rung that fails its gate, or has no verdict, is not credited. Each rung is compared with the last credited rung
    before it, whose name is `last`, and with the first.
    """
    references = _reference_losses(ladder[0], records)
    measured: dict[RunConfig, Row] = {}
    for row in rows_of(to_frame(records, ceilings)):
        measured.setdefault(row["config"], row)
    rows: list[Row] = []
    means_s: dict[str, list[float]] = {}
    for rung in ladder:
        own = _records_of(rung.config, records)
        done = [record for record in own if record.status is Status.OK]
        frame = measured.get(rung.config.configuration, dict.fromkeys(RESULTS))
        gate = judge(rung.config.precision, [record.losses for record in done], references, fp8=rung.config.fp8)
        means_s[rung.name] = process_means(own)
        credited = [row for row in rows if row["is_credited"]]
        row = {
            **_settings(rung),
            **{name: frame[name] for name in MEASURED},
            "ended": "not run" if frame["status"] is None else STATUS_WORDS[Status(frame["status"])],
            "cv": frame["step_cv"],
            "is_doubted": in_doubt(codes_of(frame)),
            "processes": len(done),
            "gpus": {record.environment.device_uuid for record in done if record.environment} - {None},
            "is_credited": bool(done) and gate.passed is True,
            "last": credited[-1]["rung"] if credited else "",
            **_gate(gate, bool(done)),
            **_compiled(done),
            **_profiled(rung, profiles, frame["step_mean_ms"]),
            **_least(rung.config),
        }
        row |= _over("speed_up_over_last", credited[-1:], row, means_s)
        row |= _over("speed_up_over_first", credited[:1], row, means_s)
        rows.append(row)
    return rows


def fastest_row(rows: Sequence[Row]) -> Row | None:
    """The credited rung with the shortest step; None where there is none."""
    return min((row for row in rows if row["is_credited"]), key=lambda row: float(row["step_mean_ms"]), default=None)


def speed_up(slow: Sequence[float], fast: Sequence[float]) -> tuple[float, float | None, float | None] | None:
    """The speed-up and its interval, from the process means of both sides in seconds; None if a side has no means.

    It is the ratio of the geometric means. The interval is that of `cs336 compare`, inverted; it needs several means.
    """
    if not slow or not fast or not all((*slow, *fast)):
        return None
    if min(len(slow), len(fast)) < 2:
        return (sum(slow) / len(slow)) / (sum(fast) / len(fast)), None, None
    found = compare(slow, fast, confidence=CONFIDENCE)
    if found.low is None or found.high is None:
        return 1 / found.ratio, None, None
    return 1 / found.ratio, 1 / found.high, 1 / found.low


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
        "attention": None if config.model_factory else f"{config.model.attention}-{config.model.sdpa_backend}",
    }


def _gate(gate: Gate, has_run: bool) -> Row:
    """Distances and the bound are shares of the fall of the reference's loss."""
    return {
        "gate": VERDICTS[gate.passed] if has_run else "",
        "no_verdict": gate.missing,
        f"loss_{GATE_STEPS}": gate.loss,
        "distance_last": gate.last,
        "distance_largest": gate.largest,
        "bound": gate.bound,
    }


def _compiled(done: Sequence[RunRecord]) -> Row:
    """The longest compilation, of the process that found least in the compiler's cache; the largest of all counts."""
    found = [record.compilation for record in done if record.compilation is not None]
    counts = {name: max((int(getattr(each, name)) for each in found), default=None) for name in COMPILED}
    return {"compile_s": max((each.seconds for each in found), default=None), **counts}


def _least(config: RunConfig) -> Row:
    """The least bytes that a step must move; None where they are not known."""
    found = traffic(config)
    return {f"least_{name}_bytes": getattr(found, name, None) for name in LEAST}


def _over(key: str, slower: Sequence[Row], row: Row, means_s: Mapping[str, Sequence[float]]) -> Row:
    """The speed-up over the other rung, if there is one, with its interval and what puts it in doubt."""
    found = speed_up(means_s[slower[0]["rung"]], means_s[row["rung"]]) if slower else None
    times, low, high = found or (None, None, None)
    return {**derived(key, times, *slower, row), f"{key}_ci95_low": low, f"{key}_ci95_high": high}


def _records_of(config: RunConfig, records: Sequence[RunRecord]) -> list[RunRecord]:
    found = [record for record in records if record.config.configuration == config.configuration]
    return sorted(found, key=lambda record: record.config.repeat)


def _reference_losses(first: Rung, records: Sequence[RunRecord]) -> list[tuple[float | None, ...]]:
    """Losses of the first rung; where it has none, of the same step with its activations computed again."""
    candidates = [first.config]
    if first.config.model_factory is None:
        candidates.append(reference(first))
    for config in candidates:
        if done := [record.losses for record in _records_of(config, records) if record.status is Status.OK]:
            return done
    return []


def _profiled(rung: Rung, profiles: Sequence[Profiled], step_ms: float | None) -> Row:
    """Counts of the rung's last profile, beside the mean step without a profiler; None for what is not known.

    `busy_share` is over the plain step: a profiler slows the host, not the kernels. It is at most 1, and unknown on a
    CPU. `slowdown` is by how much longer the profiled step took, as a share of the plain one.
    """
    found = [entry.profile for entry in profiles if entry.config == reason_run(rung)]
    if not found or not found[-1].num_steps:
        return dict.fromkeys(("work", "launches_per_step", "busy_ms", "class_s", "busy_share", "slowdown"))
    row = counts_of(found[-1])
    share, slowed = ratio(row["busy_ms"], step_ms), ratio(row.pop("profiled_step_ms"), step_ms)
    on_device = share is not None and row["work"] is not Work.OPERATORS
    return {
        **row,
        "busy_share": min(1.0, share) if on_device and share is not None else None,
        "slowdown": None if slowed is None else slowed - 1,
    }


def counts_of(profile: StepProfile) -> Row:
    """Sums over the profile, per step: kernels (on a CPU operators), busy time, and durations of kernels by class."""
    steps = profile.num_steps
    class_s: dict[KernelClass, float] = {}
    for times in profile.classes:
        class_s[times.kind] = class_s.get(times.kind, 0.0) + times.total_s / steps
    return {
        "work": profile.work,
        "launches_per_step": sum(sum(phase.launches) for phase in profile.phases) / steps,
        "busy_ms": sum(sum(phase.busy_s) for phase in profile.phases) / steps * 1e3,
        "profiled_step_ms": sum(profile.step_s) / steps * 1e3,
        "class_s": class_s,
    }


def is_slowed(row: Row | None) -> bool:
    """Whether the profiled step was so slow that its class times do not explain the plain one."""
    return row is not None and row["slowdown"] is not None and row["slowdown"] > MAX_SLOWDOWN
