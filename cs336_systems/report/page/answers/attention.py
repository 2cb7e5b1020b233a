"""Answers about attention alone: written out, compiled, and the student's own kernel."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from cs336_systems.config import Device, Phase, Precision
from cs336_systems.record import Status
from cs336_systems.report.columns import Column, Row, column, three_digits
from cs336_systems.report.numbers import DOUBT, between, scientific, significant
from cs336_systems.report.page.answers.answer import Answer, Material, Place
from cs336_systems.report.page.commands import command_for
from cs336_systems.report.sections.attention import TIMED, attention_rows, cells_of, growth_words, limit_notes
from cs336_systems.report.sections.study import across, pivoted
from cs336_systems.report.table import Table, make_table
from cs336_systems.studies.attention_records import AttentionCell, AttentionStudy, Implementation
from cs336_systems.text import counted

COURSE_CONTEXTS = (256, 1024, 4096, 8192, 16384)
COURSE_HEADS = (16, 32, 64, 128)
OWN_CONTEXTS = tuple(2**power for power in range(7, 17))
OWN_PRECISIONS = (Precision.BF16, Precision.FP32)
WORDS = {"forward": "Forward", "backward": "Backward", "together": "Forward and backward together"}
SAME = "about as fast"
ABOUT = 0.02
"""Two times that differ by less than this share count as about the same."""


def attention(material: Material) -> Answer | None:
    """Times and memory of written-out attention, and where it runs out of memory."""
    if (found := _best(material, Implementation.NAIVE)) is None:
        return None
    directory, study, rows = found
    naive = cells_of(rows, Implementation.NAIVE)
    columns = [column(key, drop_order=0) for key in ("d_head", "context_length")]
    columns += [
        _time("forward"),
        _time("backward"),
        Column("held before backward", "MiB", key="before_backward_mib", instead="ended"),
    ]
    columns.append(Column("of it saved by forward", "MiB", key="saved_mib"))
    table = make_table("Attention written out", columns, sorted(naive, key=_shape))
    known = [row for row in naive if row["saved_mib"] is not None]
    grows = [f"From {text}" for text in growth_words(known, "what forward leaves for backward grows")] if known else []
    sentences = [*_times(naive), *limit_notes(study, rows), *grows, *_without(rows, known)]
    return _answer(material, directory, rows, sentences, [table], _lacking(naive))


def _times(naive: Sequence[Row]) -> Iterator[str]:
    """Times of the widest head at the shortest and the longest context, and how they grow at the end."""
    widest = [row for row in naive if row["d_head"] == naive[-1]["d_head"] and row["forward_mean_ms"]]
    widest = [row for row in widest if row["backward_mean_ms"]]
    if not widest:
        return
    ends = widest[:: len(widest) - 1] if len(widest) > 1 else widest
    at = " and ".join(str(row["context_length"]) for row in ends)
    told = " and ".join(
        f"{part} takes {' and '.join(three_digits(row[f'{part}_mean_ms']) for row in ends)} ms"
        for part in ("forward", "backward")
    )
    grown = ""
    if len(widest) > 1:
        before, last = widest[-2:]
        forward, backward = (three_digits(last[key] / before[key]) for key in ("forward_mean_ms", "backward_mean_ms"))
        grown = (
            f" From context {before['context_length']} to {last['context_length']} forward grows {forward}-fold and "
            f"backward {backward}-fold."
        )
    head, contexts = widest[0]["d_head"], counted(len(ends), "context").split()[1]
    yield f"At d_head {head} and {contexts} {at}, {told}.{grown} naive is attention written out."


def _without(rows: Sequence[Row], naive: Sequence[Row]) -> Iterator[str]:
    """Memory that a kernel keeps if it never writes the weights to memory."""
    for row in naive[-1:]:
        same = [other for other in rows if _shape(other) == _shape(row) and other["saved_mib"]]
        if (least := min(same, key=lambda other: other["saved_mib"], default=None)) is not None and least is not row:
            yield (
                f"What grows with the square of the context are the scores and weights. A fused kernel never writes "
                f"them to memory and computes them again in backward: there {least['implementation']} leaves "
                f"{significant(least['saved_mib'])} MiB for {significant(row['saved_mib'])}."
            )


def compiled_attention(material: Material) -> Answer | None:
    """The same attention under torch.compile."""
    if (found := _best(material, Implementation.COMPILED)) is None:
        return None
    directory, _, rows = found
    names = [Implementation.NAIVE, Implementation.COMPILED]
    table = _beside("Attention eager and compiled", sorted(rows, key=_shape), names, ("forward", "backward"))
    widest = max(row["d_head"] for row in rows)
    kept = [row for row in rows if row["d_head"] == widest]
    gains = [text for part in ("forward", "backward") for text in _gain(kept, part, *names)]
    sentences = [*(f"At d_head {widest}, {text}" for text in gains), *_kept(rows)]
    return _answer(material, directory, rows, sentences, [table], _lacking(cells_of(rows, Implementation.COMPILED)))


def _kept(rows: Sequence[Row]) -> Iterator[str]:
    """A sentence that compilation does not change what is kept for backward, if that is so."""
    pairs = {_shape(row): row["saved_mib"] for row in cells_of(rows, Implementation.NAIVE) if row["saved_mib"]}
    for row in cells_of(rows, Implementation.COMPILED)[-1:]:
        if row["saved_mib"] and pairs.get(_shape(row)) == row["saved_mib"]:
            yield (
                "Compilation fuses scaling, masking and softmax into fewer kernels, but writes the weights to memory "
                f"all the same: forward leaves {significant(row['saved_mib'])} MiB for backward, as eager's does "
                f"(d_head {row['d_head']}, context {row['context_length']}). Where contexts are short, the host's "
                "launches take longer than the kernels, and a compiled function has more work before its first."
            )


def own_kernel(material: Material) -> Answer | None:
    """The student's own kernel beside PyTorch's attention."""
    if (found := _best(material, Implementation.OWN)) is None:
        return None
    directory, study, rows = found
    widest = max(row["d_head"] for row in rows)
    kept = sorted(
        (row for row in rows if row["d_head"] == widest), key=lambda row: list(Precision).index(row["precision"])
    )
    every = [name for name in Implementation if name is not Implementation.OWN and cells_of(kept, name)]
    tables = [
        _beside(
            f"{WORDS[part]} at d_head {widest}: own kernel and PyTorch's", kept, [*every, Implementation.OWN], [part]
        )
        for part in TIMED
    ]
    sentences = [f"own is {study.grid.own}, naive is attention written out in PyTorch; at d_head {widest}:"]
    for precision in sorted(study.precisions, key=list(Precision).index):
        in_it = [row for row in kept if row["precision"] is precision]
        gains = _gain(in_it, "together", Implementation.NAIVE, Implementation.OWN)
        sentences += [f"In {precision} {text}" for text in (*gains, *_longest(in_it), *_ends(in_it))]
    return _answer(material, directory, rows, sentences, tables, _lacking_of_own(cells_of(rows, Implementation.OWN)))


def _gain(rows: Sequence[Row], part: str, before: Implementation, after: Implementation) -> Iterator[str]:
    """How many times as fast `after` is as `before` in this pass, and at which contexts it is faster."""
    pairs = list(_pairs(rows, (before, after), part))
    gains = {second["context_length"]: gain for _, second, gain in pairs}
    if gains:
        ends = between({f"context {context}": gain for context, gain in gains.items()}, three_digits)
        doubted = sum(row[f"{part}_is_doubted"] for pair in pairs for row in pair[:2])
        doubts = f" Of these {2 * len(pairs)} times, {doubted} are in doubt ({DOUBT})." if doubted else ""
        yield f"{after} is {ends} times as fast as {before} in {WORDS[part].lower()}: {_where(gains)}.{doubts}"


def _where(gains: Mapping[int, float]) -> str:
    """In words: faster or slower, by more than ABOUT, at the longest contexts, from which on, and at shorter ones."""
    contexts = list(gains)
    words = ["slower" if gain < 1 - ABOUT else "faster" if gain > 1 + ABOUT else SAME for gain in gains.values()]
    start = max((number + 1 for number, word in enumerate(words) if word != words[-1]), default=0)
    if start == 0:
        return f"{words[-1]} at all contexts" if len(contexts) > 1 else f"{words[-1]} at context {contexts[0]}"
    since = f"at context {contexts[-1]}" if start == len(contexts) - 1 else f"from context {contexts[start]} on"
    before = Counter(words[:start])
    which = "shorter one" if start == 1 else f"{start} shorter ones"
    if len(before) == 1:
        return f"{words[-1]} {since}, and {words[0]} at the {which}"
    counts = ", ".join(f"{number} {word}" for word, number in before.items())
    return f"{words[-1]} {since}; of the {which}, {counts}"


def _longest(rows: Sequence[Row]) -> Iterator[str]:
    """At the longest context that own has: its time beside the fastest of PyTorch's, and what forward leaves."""
    timed = [row for row in cells_of(rows, Implementation.OWN) if row["together_mean_ms"]]
    for last in timed[-1:]:
        same = [row for row in rows if _shape(row) == _shape(last) and row["together_mean_ms"] and row is not last]
        own = f"at context {last['context_length']}, own takes {three_digits(last['together_mean_ms'])} ms for both"
        if not same:
            yield f"{own}."
            continue
        best = min(same, key=lambda row: float(row["together_mean_ms"]))
        ratio = three_digits(last["together_mean_ms"] / best["together_mean_ms"])
        yield (
            f"{own}, {ratio} times as long as {best['implementation']}, the fastest of PyTorch's "
            f"({three_digits(best['together_mean_ms'])} ms)."
        )
        naive = [row for row in cells_of(same, Implementation.NAIVE) if row["saved_mib"]]
        if naive and last["saved_mib"]:
            yield (
                f"forward of own leaves {three_digits(last['saved_mib'])} MiB for backward there, and that of naive, "
                f"which keeps its T x T weights, {three_digits(naive[0]['saved_mib'])} MiB."
            )


def _lacking_of_own(rows: Sequence[Row]) -> str:
    """Which precisions, and which contexts of a precision, the own kernel was not measured in."""
    said = []
    for precision in OWN_PRECISIONS:
        there = {_shape(row) for row in rows if row["precision"] is precision}
        missing = [length for length in OWN_CONTEXTS if any((head, length) not in there for head in COURSE_HEADS)]
        if missing:
            said.append(f"{precision} at contexts {', '.join(map(str, missing))}" if there else str(precision))
    return " and ".join(said)


def _ends(rows: Sequence[Row]) -> Iterator[str]:
    """Where an implementation ran out of memory, and how far the own kernel's output is off."""
    for name in dict.fromkeys(row["implementation"] for row in rows):
        failed = [row for row in cells_of(rows, name) if row["status"] is Status.OOM]
        if failed:
            yield f"{name} runs out of memory from context {min(row['context_length'] for row in failed)} on."
    errors = [
        row["output_relative_error"] for row in cells_of(rows, Implementation.OWN) if row["output_relative_error"]
    ]
    if errors:
        yield (
            f"own's output differs from that in float64 by at most {scientific(max(errors))} of its largest magnitude."
        )


def _best(material: Material, name: Implementation) -> tuple[Path, AttentionStudy, list[Row]] | None:
    """The study of this implementation with the most cells of the course's grid, on a GPU, in its precision; newest."""
    is_own = name is Implementation.OWN
    found = [
        (directory, study, timed)
        for directory, study in material.collection.attention.items()
        if (
            timed := [
                each.cell
                for each in study.results
                if each.cell.implementation is name and each.measurement(Phase.STEP) is not None
            ]
        )
    ]
    if not found:
        return None

    def rank(candidate: tuple[Path, AttentionStudy, list[AttentionCell]]) -> tuple[int, bool, bool, int, str]:
        directory, study, timed = candidate
        contexts = OWN_CONTEXTS if is_own else COURSE_CONTEXTS
        cells = {(cell.precision, cell.context_length, cell.d_head) for cell in timed}
        of_course = [cell for cell in cells if cell[1] in contexts and cell[2] in COURSE_HEADS]
        has_settings = (study.grid.batch_size, study.grid.causal) == ((1, True) if is_own else (8, False))
        in_full = any(cell.precision is Precision.FP32 for cell in timed)
        on_gpu = study.grid.device is Device.CUDA
        return len(of_course) * has_settings, on_gpu, in_full, len(cells), str(directory)

    directory, study, timed = max(found, key=rank)
    rows = attention_rows(study)
    if not is_own:
        precisions = [cell.precision for cell in timed]
        precision = Precision.FP32 if Precision.FP32 in precisions else precisions[0]
        rows = [row for row in rows if row["precision"] is precision]
    return directory, study, sorted(rows, key=lambda row: (row["context_length"], row["d_head"]))


def _shape(row: Row) -> tuple[int, int]:
    return row["d_head"], row["context_length"]


def _time(timed: str) -> Column:
    return column(f"{timed}_mean_ms", drop_order=0, doubt=f"{timed}_is_doubted", instead="ended")


def _beside(title: str, rows: Sequence[Row], names: Sequence[Implementation], timed: Sequence[str]) -> Table:
    """A row for each shape and precision, with the times of the implementations beside each other."""
    index = ("precision", "d_head", "context_length")
    shape = [column(key, drop_order=0) for key in index[1:]]
    if len({row["precision"] for row in rows}) > 1:
        shape = [Column("precision", key="precision", numeric=False, write=str), *shape]
    times = [(part, name) for part in timed for name in names]
    is_several = len(timed) > 1
    cells = [
        replace(across(name, _time(part)), name=f"{part}, {name}" if is_several else str(name), unit="ms")
        for part, name in times
    ]
    pivot = pivoted([row for row in rows if row["implementation"] in names], index, "implementation")
    note = f"In ms, mean ± standard deviation; {DOUBT} marks a time in doubt."
    return make_table(title, [*shape, *cells], pivot, [note])


def _pairs(rows: Sequence[Row], names: Sequence[Implementation], part: str) -> Iterator[tuple[Row, Row, float]]:
    """The rows of both implementations that have this time at one shape, and the first's time over the second's."""
    before, after = names
    first, key = {_shape(row): row for row in cells_of(rows, before)}, f"{part}_mean_ms"
    for row in cells_of(rows, after):
        other = first.get(_shape(row))
        if other is not None and row[key] and other[key]:
            yield other, row, other[key] / row[key]


def _lacking(rows: Sequence[Row]) -> str:
    there = {_shape(row) for row in rows}
    missing = [length for length in COURSE_CONTEXTS if any((head, length) not in there for head in COURSE_HEADS)]
    return f"contexts {', '.join(map(str, missing))} with d_head {', '.join(map(str, COURSE_HEADS))}" if missing else ""


def _answer(
    material: Material,
    directory: Path,
    rows: Sequence[Row],
    sentences: Sequence[str],
    tables: Sequence[Table],
    lacking: str,
) -> Answer:
    study, device = material.collection.attention[directory], rows[0]["device_name"]
    kept = f"batch {study.grid.batch_size}, {'causal, ' if study.grid.causal else ''}{study.grid.passes} passes"
    precisions = ", ".join(dict.fromkeys(str(row["precision"]) for row in rows))
    place: Place = (directory, "results")
    return Answer(
        sentences=sentences,
        tables=tables,
        places=[place],
        commands=[command_for(material.collection, directory)],
        conditions=f"{device}, {precisions}, {kept}",
        lacking=lacking,
    )
