"""Sentences below the ladder's tables: what the columns count, what is missing, and what puts a time in doubt."""

from collections.abc import Iterator, Mapping, Sequence

from cs336_systems.analysis.kernels.classes import KernelClass
from cs336_systems.analysis.kernels.step_profile import Work
from cs336_systems.analysis.statistics import FEWEST
from cs336_systems.config import OptimizerKind
from cs336_systems.costs.traffic import OPTIMIZER_BYTES
from cs336_systems.report.columns import Row, column, short
from cs336_systems.report.sections.ladder.rows import CONFIDENCE, MAX_SLOWDOWN, fastest_row, is_slowed
from cs336_systems.report.sections.steps import too_few_note, warning_notes
from cs336_systems.report.words import DOUBT, GIGA, significant
from cs336_systems.sweep.ladder import GATE_STEPS

Rows = Sequence[Row]
MIN_CHANGE = 0.01
"""Smallest relative change that is mentioned, of a count, of bytes, of the peak, or of a class over the busy time."""
MIN_SHARE_CHANGE = 0.02
"""Smallest change that is mentioned of the share of the step in which the GPU is busy."""
MIN_CLASS_PART = 0.25
"""Smallest change of a class that is mentioned, as a part of the change of the busy time."""
MAX_CLASSES = 3
"""Most classes of kernels that are named: those whose time changes most."""


def speed_notes(rows: Rows) -> Iterator[str]:
    """How the times were taken, what the shares are of, which rung is the fastest, and what went wrong."""
    yield "Times are mean ± standard deviation over the measured steps of a process."
    yield from _intervals(rows)
    yield from _shares(rows)
    yield from findings(rows)
    yield from _other_gpus(rows)
    yield from warning_notes([row["warnings"] for row in rows], "rungs")
    if any(row["speed_up_over_first"] and row["speed_up_over_first_is_doubted"] for row in rows):
        yield f"{DOUBT} marks a speed-up of times that are in doubt, with its deviation where there is no interval."
    for row in rows:
        if row["error"]:
            yield f"{row['rung']}: {row['error']}"


def _other_gpus(rows: Rows) -> Iterator[str]:
    """Rungs that are compared with one that ran on another GPU."""
    by_name = {row["rung"]: row["gpus"] for row in rows}
    others = [row for row in rows if row["gpus"] and row["last"] and row["gpus"] != by_name[row["last"]]]
    if others:
        yield (
            f"Measured on another GPU than the rung before: {_names(others)}. GPUs of one kind may differ by more than "
            "the intervals tell."
        )


def findings(rows: Rows) -> Iterator[str]:
    """Which rung is the fastest, and which are not credited."""
    first = next((row for row in rows if row["is_credited"]), None)
    if first is not None and first is not rows[0]:
        yield f"The first rung that counts is {first['rung']}."
    if first is not None:
        yield from _fastest(rows, first)
    failed = [row for row in rows if row["processes"] and not row["is_credited"]]
    if failed:
        yield f"Not credited, so no measure for others: {_names(failed)}."


def gate_notes(rows: Rows) -> Iterator[str]:
    """Notes on what the losses are compared with, why verdicts are missing, and which compilation is shown."""
    yield (
        f"Losses of the first {GATE_STEPS} steps, on the same data from the same weights: their distance from those of "
        "the first rung, at the last step and at the worst, as a share of how far these fall. Of several processes the "
        "worst counts."
    )
    missing = {row["no_verdict"] for row in rows if row["processes"] and row["no_verdict"]}
    yield from (f"No verdict where {reason}." for reason in sorted(missing))
    if any(row["compile_s"] is not None for row in rows):
        yield (
            "Compiling: the longest of the rung's processes. What an earlier one has compiled is in the compiler's "
            "cache, which is empty when the ladder begins."
        )


def count_notes(rows: Rows) -> Iterator[str]:
    """Notes on where the counts come from, and on which bytes are counted."""
    if any(row["launches_per_step"] is not None for row in rows):
        yield "Counts are those of a run of its own under torch.profiler."
    if any(row["busy_share"] is not None for row in rows):
        yield "Busy is over the step's time without a profiler."
    ran = [row for row in rows if row["processes"]]
    if missing := [row for row in ran if row["launches_per_step"] is None]:
        which = "any rung" if len(missing) == len(ran) else _names(missing)
        yield f"There is no profile of {which}: no counts, no busy time, no class times."
    if any(row["least_state_bytes"] for row in rows):
        yield from _bytes(rows)


def reason_notes(rows: Rows) -> Iterator[str]:
    """Notes on which run the class times are from, and for which rungs they are left out."""
    if any(row["launches_per_step"] is not None for row in rows):
        yield "Class times are those of the profiled run."
    slowed = [(row["rung"], row["slowdown"]) for row in rows if is_slowed(row)]
    if slowed:
        named = ", ".join(f"{name} ({significant(100 * slowdown, 3)}%)" for name, slowdown in slowed)
        yield (
            f"Where the profiled step took over {MAX_SLOWDOWN:.0%} longer than the plain one, class times are left "
            f"out, of the rung's reason and of that of the rung compared with it: {named}."
        )


def _intervals(rows: Rows) -> Iterator[str]:
    counts = sorted({row["processes"] for row in rows if row["processes"]})
    if any(row["speed_up_over_last_ci95_low"] is not None for row in rows):
        number = " to ".join(str(count) for count in dict.fromkeys((max(FEWEST, counts[0]), counts[-1])))
        yield f"Intervals of {CONFIDENCE:.0%} over the means of {number} fresh processes of each, run alternately."
    elif counts[-1:] == [1]:
        yield "One process of each: nothing is known of how much a repeat would differ, so there are no intervals."
    yield from too_few_note(counts)


def _shares(rows: Rows) -> Iterator[str]:
    """A note on the rates that MFU and the share of the ceiling refer to, if these columns have values."""
    wholes = {
        "mfu": "MFU: of the promised dense peak.",
        "ceiling_share": "Of ceiling: of the highest rate that matrix products were measured to reach.",
    }
    said = [sentence for name, sentence in wholes.items() if any(row[name] is not None for row in rows)]
    if said:
        fp8 = "; fp8 is over bf16's" if any(row["fp8"] for row in rows) else ""
        yield (
            f"{' '.join(said)} Each is over that of the rung's own precision, and falls where that is higher{fp8}. "
            "FLOPs are the model's, with attention in full."
        )


def _fastest(rows: Rows, first: Row) -> Iterator[str]:
    """A note on the fastest credited rung: its speed-up over the first, and which of the two times are in doubt."""
    if best := fastest_row(rows):
        times = column("speed_up_over_first").cell(best)
        gain = f", {times} times as fast as {first['rung']}" if times else ""
        both = best["rung"], first["rung"]
        doubted = [row["rung"] for row in rows if row["rung"] in both and row["is_doubted"]]
        doubt = f", by times in doubt of {' and '.join(doubted)}" if doubted else ""
        yield f"The fastest is {best['rung']}: {significant(best['step_mean_ms'])} ms{gain}{doubt}."


def _bytes(rows: Rows) -> Iterator[str]:
    """What the columns of bytes hold."""
    has_foreach = any(row["least_state_bytes"] and row["optimizer"] is OptimizerKind.FOREACH for row in rows)
    each = OPTIMIZER_BYTES[OptimizerKind.FOREACH]
    foreach = f" (foreach: {each} bytes a parameter, the passes of that implementation)" if has_foreach else ""
    yield (
        "Least bytes are read and written. Weights: by the products, in forward and backward, with the gradients that "
        "they write and the embedding's; casts: by autocast, of weights and of their gradients; AdamW: of parameters, "
        f"gradients, moments and copies{foreach}; activations: all else that products read and write. Element-wise "
        "work and norms are left out."
    )
    if fp8 := [row for row in rows if row["fp8"]]:
        yield f"Least bytes are not counted for {_names(fp8)}, whose casts and copies have no closed form here."


def _names(rows: Rows) -> str:
    return ", ".join(row["rung"] for row in rows)


def reasons(row: Row, last: Row | None) -> str:
    """`450 -> 310 kernels; GPU busy 9.50 -> 8.20 ms; ...`: the changes from `last` to the row, or the row's values."""
    unit = " operators" if row["work"] is Work.OPERATORS else " kernels"
    found = [
        *_change("", "launches_per_step", unit, row, last),
        *_busy(row, last),
        *_classes(row, last),
        *_change("weights, gradients and AdamW move at least ", "least_state_bytes", " GB", row, last, 1 / GIGA),
        *_change("activations of the products at least ", "least_activations_bytes", " GB", row, last, 1 / GIGA),
        *_change("peak ", "peak_allocated_gib", " GiB", row, last),
    ]
    return "; ".join(found) or "no change that is counted here"


def _change(words: str, key: str, unit: str, row: Row, last: Row | None, scale: float = 1) -> Iterator[str]:
    """`words 450 -> 310 unit` for a change, `words 310 unit` if the earlier value is not known."""
    now = row[key]
    if now is None:
        return
    if last is None or last[key] is None:
        yield f"{words}{short(now * scale)}{unit}"
    elif abs(now - last[key]) >= MIN_CHANGE * abs(last[key]):
        yield f"{words}{short(last[key] * scale)} -> {short(now * scale)}{unit}"


def _busy(row: Row, last: Row | None) -> Iterator[str]:
    """The busy time, whenever it is known, and its share of the step if the GPU now waits less, or longer."""
    if row["busy_share"] is None:
        return
    now, share = short(row["busy_ms"]), short(100 * row["busy_share"])
    if last is None or last["busy_share"] is None:
        yield f"GPU busy {now} ms ({share}% of the step)"
        return
    is_changed = abs(row["busy_share"] - last["busy_share"]) >= MIN_SHARE_CHANGE
    shares = f" ({short(100 * last['busy_share'])} -> {share}% of the step)" if is_changed else ""
    yield f"GPU busy {short(last['busy_ms'])} -> {now} ms{shares}"


def _classes(row: Row, last: Row | None) -> Iterator[str]:
    """The classes that account for the change of the busy time; without an earlier profile, those with the most time.

    None where either profiled step was too slow to stand for the plain one.
    """
    if row["class_s"] is None or is_slowed(row) or is_slowed(last):
        return
    earlier = last if last and last["class_s"] is not None else None
    now: Mapping[KernelClass, float] = row["class_s"]
    before: Mapping[KernelClass, float] = earlier["class_s"] if earlier else {}

    def change_s(kind: KernelClass) -> float:
        return abs(now.get(kind, 0.0) - before.get(kind, 0.0))

    part_ms = MIN_CLASS_PART * abs(row["busy_ms"] - earlier["busy_ms"]) if earlier else 0.0
    least_s = max(MIN_CHANGE * row["busy_ms"], part_ms) / 1e3
    for kind in sorted({**before, **now}, key=change_s, reverse=True)[:MAX_CLASSES]:
        if change_s(kind) >= least_s > 0:
            arrow = f"{short(before.get(kind, 0.0) * 1e3)} -> " if earlier else ""
            yield f"{kind} {arrow}{short(now.get(kind, 0.0) * 1e3)} ms"
