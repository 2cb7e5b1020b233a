"""The questions that CS336 (assignment 2) asks of times, answered from the frame of results.

Every number comes from a row of the frame, and every sentence names the rows that it is about. A question that the
frame does not support has no answer, and is left out.
"""

from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter

import pandas as pd

from cs336_systems.analysis.warnings import MAX_CV
from cs336_systems.config import Precision
from cs336_systems.record import RunRecord
from cs336_systems.report.columns import Row, three_digits
from cs336_systems.report.formats import answers_markdown
from cs336_systems.report.frame import SPEED_UPS, codes_of, over_warmup, rows_of, steady, to_frame
from cs336_systems.report.identity import by_name, names_of
from cs336_systems.report.numbers import DOUBT, between, mean_and_std, milliseconds, percent_of, significant
from cs336_systems.studies.ceilings_files import NO_CEILINGS, Ceilings

FIRST_STEPS = 1.05
"""Ratio of the first measured step to the mean step after enough warm-up above which a reason is given."""
Answers = list[tuple[str, list[tuple[str, str]]]]
"""Questions with their paragraphs; each paragraph has the name of its configuration, or none."""


_OFF_FORECAST = {
    True: (
        "Slower than this device should be, by its measured ceilings",
        "Was the GPU throttled or shared, the CPU slower or shared, or another kernel chosen? "
        "cs336 ceilings measures again what the device reaches.",
    ),
    False: (
        "Faster than its measured ceilings allow",
        "Were they measured while the device was throttled or shared, or is another kernel chosen?",
    ),
}
"""Words for steps that are slower than a trusted forecast and for faster ones, and possible reasons."""


def step_answers(frame: pd.DataFrame) -> Answers:
    """The questions that the frame answers, in the order of the course."""
    rows = [row for row in rows_of(steady(frame)) if row["step_mean_ms"]]
    every = {
        "How long are forward, backward and the optimizer, beside each other?": phase_answers(rows),
        "Is the spread of a step small?": spread_answers(rows),
        "What do too few warm-up steps change?": warmup_answers(rows_of(over_warmup(frame))),
        "What does low precision change, and how does that change over sizes and contexts?": precision_answers(rows),
        "What do compilation, another attention or another optimizer change?": choice_answers(rows),
        "What does activation checkpointing cost and save, and which group has the least peak?": (
            checkpoint_answers(rows)
        ),
        "Is a step far from what this device should take for it?": forecast_answers(rows),
    }
    return [(question, found) for question, sentences in every.items() if (found := list(sentences))]


def answers_text(records: Iterable[RunRecord], ceilings: Ceilings = NO_CEILINGS) -> str:
    """Markdown: each question as a heading, and below it the answers; empty where nothing is answered."""
    found = step_answers(to_frame(records, ceilings))
    return answers_markdown("How long a step takes: the questions of CS336", found) if found else ""


def texts(answers: Iterable[tuple[str, str]]) -> list[str]:
    """Paragraphs as sentences that begin with what they are about."""
    return [f"{name}: {text}" if name else text for name, text in answers]


def _named(rows: Sequence[Row], *without: str) -> list[str]:
    """A few words for each row, with what tells it from the others."""
    return names_of([row["identity"] for row in rows], without=without)


def phase_answers(rows: Sequence[Row], *without: str) -> Iterator[tuple[str, str]]:
    """How long backward takes beside forward, and which share of a step the optimizer takes.

    The names of rows do not have the settings `without`, here and in the other functions.
    """
    both = [row for row in rows if row["forward_mean_ms"] and row["backward_mean_ms"]]
    if both:
        ratios = by_name(both, lambda row: row["backward_mean_ms"] / row["forward_mean_ms"], without=without)
        yield "", f"Backward takes {between(ratios, three_digits)} times as long as forward, which includes the loss."
    trained = [row for row in rows if row["optimizer_mean_ms"]]
    if trained:
        shares = by_name(trained, lambda row: row["optimizer_mean_ms"] / row["step_mean_ms"], without=without)
        yield "", f"The optimizer takes {between(shares, percent_of)} of a training step."


def spread_answers(rows: Sequence[Row], *without: str) -> Iterator[tuple[str, str]]:
    """Whether the deviation of a step is small beside its mean, and where it is not."""
    known = [row for row in rows if row["step_cv"] is not None]
    if not known:
        return
    spreads = by_name(known, itemgetter("step_cv"), without=without)
    large = {name: spread for name, spread in spreads.items() if spread > MAX_CV}
    limit = f"{100 * MAX_CV:g} %"
    text = f"The standard deviation of a step over its mean is {between(spreads, percent_of)}"
    if not large:
        yield "", f"{text}: at most {limit} everywhere."
    else:
        named = ", ".join(large)
        yield "", f"{text}: above {limit} in {len(large)} of {len(known)} configurations ({named})."


def _groups(rows: Sequence[Row], setting: str) -> Iterator[tuple[str, list[Row]]]:
    """Rows that differ in this setting alone, smallest value first, with a name for each group of them."""
    groups: dict[str, list[Row]] = {}
    for name, row in zip(_named(rows, setting), rows, strict=True):
        groups.setdefault(name, []).append(row)
    for name, own in groups.items():
        yield name, sorted(own, key=lambda row: row[setting])


def warmup_answers(rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """For each configuration: its steps after few warm-up steps beside those after most."""
    timed = [row for row in rows if row["step_mean_ms"] and row["first_step_ms"]]
    for name, own in _groups(timed, "warmup_steps"):
        *few, most = own
        if not few:
            continue
        enough_ms = most["step_mean_ms"]
        told = [
            f"after {_steps(row['warmup_steps'])} the mean step is {milliseconds(row['step_mean_ms'])} "
            f"({three_digits(row['step_mean_ms'] / enough_ms)} times that), the first measured one "
            f"{milliseconds(row['first_step_ms'])} ({three_digits(row['first_step_ms'] / enough_ms)} times)"
            + _spread_of(row)
            for row in few
        ]
        why = (
            " The first steps also load kernels, fill the allocator's cache and make the optimizer's state."
            if max(row["first_step_ms"] for row in few) > FIRST_STEPS * enough_ms
            else ""
        )
        yield (
            name,
            (
                f"After {_steps(most['warmup_steps'])} the mean step is {milliseconds(enough_ms)}{_spread_of(most)}; "
                f"{'; '.join(told)}.{why}"
            ),
        )


def _steps(count: int) -> str:
    return "no warm-up" if count == 0 else f"{count} warm-up step{'s' if count > 1 else ''}"


def _spread_of(row: Row) -> str:
    return "" if row["step_cv"] is None else f", with a deviation of {percent_of(row['step_cv'])}"


def precision_answers(rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """For each low precision: its speed-up over fp32, and how that changes over sizes and contexts."""
    for precision in Precision:
        known = [row for row in rows if row["precision"] == precision and row["speed_up"]]
        if known:
            gains = by_name(known, itemgetter("speed_up"))
            words = [
                f"A step is {between(gains, three_digits)} times as fast as in fp32.{_doubts(known, 'speed_up')}",
                *_trend(known, "size", "context_length", "At context"),
                *_trend(known, "context_length", "size", "With"),
            ]
            yield str(precision), " ".join(words)


def _doubts(rows: Sequence[Row], key: str) -> str:
    number = sum(bool(row[f"{key}_is_doubted"]) for row in rows)
    return f" In {number} of {len(rows)} of these a time is in doubt ({DOUBT})." if number else ""


def _trend(rows: Sequence[Row], along: str, across: str, word: str) -> Iterator[str]:
    """How the speed-up changes along one setting, at the last value of another, and whether it grows at all of them."""
    lines: dict[object, list[Row]] = {}
    for row in rows:
        lines.setdefault((row[across], *_rest(row)), []).append(row)
    lines = {key: own for key, own in lines.items() if len({row[along] for row in own}) > 1}
    if not lines:
        return
    grows = sum(own[-1]["speed_up"] > own[0]["speed_up"] for own in lines.values())
    devices = [row["identity"]["device_name"] for own in lines.values() for row in own]
    where = f" on {devices[-1]}" if len(set(devices)) > 1 else ""
    told = [own for own in lines.values() if own[0]["identity"]["device_name"] == devices[-1]]
    last = told[-1] if across == "size" else max(told, key=lambda own: own[0][across])
    gains = " and ".join(f"{three_digits(row['speed_up'])} {_at(row, along)}" for row in (last[0], last[-1]))
    ends = "the smallest to the largest size" if along == "size" else "the shortest to the longest context"
    yield f"{word} {last[0][across]}{where} it is {gains}. From {ends} it grows in {grows} of {len(lines)} cases."


def _rest(row: Row) -> tuple[str, ...]:
    """The other distinguishing settings of a row, so that a line has one configuration at each size and context."""
    return tuple(str(value) for name, value in row["identity"].items() if name not in _OF_TREND)


_OF_TREND = ("size", "d_model", "d_ff", "num_layers", "num_heads", "vocab_size", "context_length", "digest")


def _at(row: Row, along: str) -> str:
    return f"for {row[along]}" if along == "size" else f"at context {row[along]}"


def choice_answers(rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """The speed-ups of compilation, of another attention and of another optimizer."""
    for key, (setting, *_) in SPEED_UPS.items():
        first = {"attention": "naive attention", "compile": "the eager model", "optimizer": "the plain AdamW"}
        known = [row for row in rows if setting in first and row[key]]
        for value in dict.fromkeys(row[setting] for row in known):
            own = [row for row in known if row[setting] == value]
            gains = by_name(own, itemgetter(key))
            text = (
                f"A step is {between(gains, three_digits)} times as fast as with {first[setting]}.{_doubts(own, key)}"
            )
            yield f"{setting} {value}", text


def checkpoint_answers(rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """For each configuration: peak and time of each group size, beside those of the least peak."""
    known = [row for row in rows if row["peak_allocated_gib"]]
    for name, own in _groups(known, "checkpoint_blocks"):
        if len(own) < 2:
            continue
        best = min(own, key=lambda row: row["peak_allocated_gib"])
        text = f"The least peak, {_gib(best)}, is that with {_checkpoint(best)}; its step takes {_time(best)}."
        others = "; ".join(f"with {_checkpoint(row)} {_against(row, best)}" for row in own if row is not best)
        yield name, f"{text} The others: {others}."


def _against(row: Row, best: Row) -> str:
    peaks, times = (row[key] / best[key] for key in ("peak_allocated_gib", "step_mean_ms"))
    return f"{_gib(row)} ({three_digits(peaks)} times that) and {_time(row)} ({three_digits(times)} times)"


def _gib(row: Row) -> str:
    return f"{significant(row['peak_allocated_gib'], 3)} GiB"


def _time(row: Row) -> str:
    return f"{mean_and_std(row['step_mean_ms'], row['step_std_ms'])} ms"


def _checkpoint(row: Row) -> str:
    blocks: int = row["checkpoint_blocks"]
    return {0: "no checkpoints", 1: "a checkpoint for every block"}.get(
        blocks, f"a checkpoint for every {blocks} blocks"
    )


def forecast_answers(rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """The steps that are far from a trusted forecast, the slower ones first, with what may be the reason."""
    off = [(name, row) for name, row in zip(_named(rows), rows, strict=True) if row["is_off_forecast"]]
    for is_slower, (what, why) in _OFF_FORECAST.items():
        if own := [
            f"{name} ({_off_forecast(row)})" for name, row in off if (row["predicted_step_error"] < 0) is is_slower
        ]:
            yield "", f"{what}: {'; '.join(own)}. {why}"


def _off_forecast(row: Row) -> str:
    """The step beside its forecast, and its warnings."""
    warned = ", ".join(filter(None, codes_of(row)))
    times = f"{milliseconds(row['step_mean_ms'])}, forecast {milliseconds(row['predicted_step_ms'])}"
    return f"{times}, with warnings {warned}" if warned else times
