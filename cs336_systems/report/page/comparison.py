"""The page of a comparison: the verdicts first, then the rows that they come from, and what each side is."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from cs336_systems.analysis.compare import Verdict
from cs336_systems.analysis.matching import conditions_apart, has_changed_inputs
from cs336_systems.analysis.warnings import in_doubt
from cs336_systems.report.compared import Compared
from cs336_systems.report.numbers import DOUBT
from cs336_systems.report.page.collection import Collection, block_id
from cs336_systems.report.page.provenance import conditions_and_times
from cs336_systems.report.page.rows import Named
from cs336_systems.report.page.studies import section_blocks
from cs336_systems.report.page.write import Chapter, Linked, Part, Prose, TableBlock
from cs336_systems.report.sections.comparison import NOT_COMPARED, ONLY_A, ONLY_B
from cs336_systems.text import counted, inert_line

MOST = 8
"""Sentences below one heading that are open; the others are closed until somebody opens them."""
COUNTS = {
    Verdict.FASTER: "B is faster in {}",
    Verdict.SLOWER: "B is slower in {}",
    Verdict.CANNOT_TELL: "of {} one cannot tell",
    NOT_COMPARED: "without a time on one side: {}",
    ONLY_A: "only in A: {}",
    ONLY_B: "only in B: {}",
}
"""What is said of the number of configurations with each verdict."""
DIFFERENT = (Verdict.FASTER, Verdict.SLOWER)
Sentence = Part | Linked


def comparison_chapters(collection: Collection, directory: Path) -> list[Chapter]:
    """The verdicts, then the rows that they come from, and pictures of these."""
    compared = collection.comparisons[directory]
    source = _source(compared)
    table, *others = section_blocks(compared.section, collection, directory, source)
    assert isinstance(table, TableBlock)
    verdicts = list(_findings(compared, table))
    return [
        Chapter(id=block_id(directory, "verdicts"), title="B against A", blocks=verdicts, source=source),
        Chapter(id=block_id(directory, "rows"), title="Both sides", blocks=[table, *others]),
    ]


def _findings(compared: Compared, block: TableBlock) -> Iterator[Prose]:
    """What the rows say, in sentences whose numbers are those of the cells that they link to."""
    every_row = () if compared.sentences else enumerate(compared.rows)
    rows = [Named(row["name"], block, number) for number, row in every_row]
    told = [each for each in rows if each.row["verdict"] in DIFFERENT]
    told.sort(key=lambda each: max(each.row["ratio"], 1 / each.row["ratio"]), reverse=True)
    by_verdict = [[each for each in told if each.row["verdict"] == verdict] for verdict in DIFFERENT]
    largest = [own[0] for own in by_verdict if own]
    every = [_difference(each) for each in told]
    verdicts: list[Sentence] = [(text, block.id) for text in compared.sentences] or [_counted(rows, block)]
    verdicts += [_difference(each, f"B is {each.row['verdict']} the most in ") for each in largest]
    for own in by_verdict:
        if len(own) > 1:
            least = f"B is {own[-1].row['verdict']} the least in "
            verdicts.append(_linked(own[-1], ": {ratio} times as long as A's.", least))
    is_more = len(every) > len(largest)
    yield Prose(
        heading="Verdict", paragraphs=verdicts, more=every if is_more else (),
        more_title=f"All {len(every)} that are faster or slower",
    )  # fmt: skip
    if doubted := [each for each in rows if each.row["ratio_is_doubted"]]:
        number = f"{len(doubted)} of {counted(sum(each.row['ratio'] is not None for each in rows), 'ratio')}"
        is_one = len(doubted) == 1
        more = [_doubt(each) for each in doubted]
        yield Prose(
            heading="What is in doubt",
            paragraphs=[(f"{number} {'is' if is_one else 'are'} in doubt{_codes(doubted)}.", "")],
            more=more,
            more_title="Each with its warnings",
        )
    if compared.left_out:
        yield Prose(heading="What is left out", paragraphs=[(text, "") for text in compared.left_out])
    if missing := [_missing(each) for each in rows if each.row["ratio"] is None]:
        more_title = counted(len(missing[MOST:]), "more configuration")
        yield Prose(heading="What has no ratio", paragraphs=missing[:MOST], more=missing[MOST:], more_title=more_title)
    if reasons := [(text, "") for text in _conditions(compared)]:
        yield Prose(heading="What else may be the reason", paragraphs=reasons)
    yield Prose(heading="What A and B are", paragraphs=_sides(compared))


def _counted(rows: Sequence[Named], block: TableBlock) -> Linked:
    counts = Counter(each.row["verdict"] for each in rows)
    numbers = [words.format(counts[verdict]) for verdict, words in COUNTS.items() if counts[verdict]]
    return Linked(((f"Of {counted(len(rows), 'configuration')}: ", ""), ("; ".join(numbers), block.id), (".", "")))


def _difference(each: Named, before: str = "") -> Linked:
    """How long the step of B takes beside that of A."""
    doubt = "; this is in doubt" if each.row["ratio_is_doubted"] else ""
    times = f"{{b_step_mean_ms}} ms for B and {{a_step_mean_ms}} ms for A{doubt}."
    return _linked(each, f": its step takes {{ratio}} times as long as A's ({{ratio_low}}), {times}", before)


def _missing(each: Named) -> Linked:
    """Which side has no time, and why."""
    ended = {ONLY_A: " is only in A.", ONLY_B: " is only in B."}
    told = [f"{side.upper()}: {{{side}_step_mean_ms}}" for side in "ab"]
    return _linked(each, ended.get(each.row["verdict"], f" was not compared ({', '.join(told)})."))


def _codes(doubted: Sequence[Named]) -> str:
    """In how many of the rows the times of a side have each warning."""
    counts = Counter(
        code
        for each in doubted
        for code in {*(each.row["a_warnings"] or "").split(";"), *(each.row["b_warnings"] or "").split(";")}
        if code and in_doubt([code])
    )
    named = [f"{code} in {count}" for code, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]
    return f", by warnings on a side: {', '.join(named)}" if named else ""


def _doubt(each: Named) -> Linked:
    """The warnings of both sides."""
    found = [(side, (each.row[f"{side.lower()}_warnings"] or "").replace(";", ", ")) for side in "AB"]
    warned = " and ".join(f"the times of {side} have warnings ({codes})" for side, codes in found if codes)
    return _linked(each, f": {{ratio}} times A's step is in doubt, because {warned}.")


def _linked(each: Named, words: str, before: str = "") -> Linked:
    """The name of the configuration, then the words, with a link to the cell for each `{key}` of a column."""
    found = [(part, "") for part in re.split(r"\{(\w+)\}", words)]
    for place in range(1, len(found), 2):
        text, target = each.cell(found[place][0])
        found[place] = text.removesuffix(f" {DOUBT}"), target
    return Linked(((before + each.name, ""), *found))


def _conditions(compared: Compared) -> Iterator[str]:
    """What differs between the records besides the settings, where the user allowed that."""
    records = [record for side in compared.records for record in side]
    if apart := conditions_apart(records):
        yield f"The records come from different hardware or software ({apart}), to which a difference may be due."
    if any(map(has_changed_inputs, compared.records)):
        yield "The records of one side come from different versions of a model's source or of a token file."
    warmup = [{record.config.warmup_steps for record in side} for side in compared.records]
    if warmup[0] != warmup[1]:
        steps = [" or ".join(map(str, sorted(own))) for own in warmup]
        yield f"A had {steps[0]} warm-up steps and B had {steps[1]}, to which a difference may be due."


def _source(compared: Compared) -> str:
    """The directories of both sides, if they are not that of the comparison, and what is known of all records."""
    where = [" and ".join(compared.sides.names)] if compared.sides.records else []
    return inert_line("; ".join([*where, conditions_and_times([each for side in compared.records for each in side])]))


def _sides(compared: Compared) -> list[Part]:
    """What the user called A and B, and where and when it was measured."""
    sides = zip("AB", compared.sides.names, compared.records, strict=True)
    texts = [f"{side} is {name or 'without flags'}: {conditions_and_times(own)}." for side, name, own in sides]
    return [(inert_line(text), "") for text in texts]
