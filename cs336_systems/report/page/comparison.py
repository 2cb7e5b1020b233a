"""The page of a comparison: the verdicts first, then the rows that they come from, and what each side is."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from cs336_systems.analysis.compare import Verdict
from cs336_systems.analysis.matching import conditions_apart, has_changed_inputs
from cs336_systems.analysis.warnings import in_doubt
from cs336_systems.report.columns import three_digits
from cs336_systems.report.compared import Compared
from cs336_systems.report.page.collection import Collection, block_id
from cs336_systems.report.page.provenance import conditions_and_times
from cs336_systems.report.page.rows import Named, between, linked, listed
from cs336_systems.report.page.studies import section_blocks
from cs336_systems.report.page.write import Chapter, Linked, Part, Prose, TableBlock
from cs336_systems.report.sections.comparison import NOT_COMPARED, ONLY_A, ONLY_B
from cs336_systems.text import counted, inert_line

WORDS = {
    Verdict.FASTER: "B is faster",
    Verdict.SLOWER: "B is slower",
    Verdict.CANNOT_TELL: "B may be as fast as A",
    NOT_COMPARED: "There is no time on one side",
    ONLY_A: "Only A has times",
    ONLY_B: "Only B has times",
}
"""Words for the configurations with each verdict."""


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
    found: dict[str, list[Part | Linked]] = {
        "Verdict": [*((text, block.id) for text in compared.sentences), *_verdicts(rows)],
        "What is in doubt": [*_doubts([each for each in rows if each.row["ratio_is_doubted"]])],
        "What is left out": [(text, "") for text in compared.left_out],
        "What else may be the reason": [(text, "") for text in _conditions(compared)],
        "What A and B are": [*_sides(compared)],
    }
    return (Prose(heading=heading, paragraphs=paragraphs) for heading, paragraphs in found.items() if paragraphs)


def _verdicts(rows: Sequence[Named]) -> Iterator[Linked]:
    """For each verdict, the number of its configurations, and their least and largest ratio, or how they ended."""
    for verdict, words in WORDS.items():
        own = [each for each in rows if each.row["verdict"] == verdict]
        number = f"{words} in {len(own)} of {counted(len(rows), 'configuration')}"
        if own and own[0].row["ratio"] is not None:
            yield linked(f"{number}: its step takes ", *between(own, "ratio", three_digits), " times as long as A's.")
        elif own:
            yield linked(f"{number}: ", *listed(own, "verdict", _ended), ".")


def _ended(each: Named) -> str:
    """The configuration, with what its cells say where it is on both sides."""
    told = [f"{side.upper()}: {each.cell(f'{side}_step_mean_ms')[0]}" for side in "ab"]
    return f"{each.name} ({', '.join(told)})" if each.row["verdict"] == NOT_COMPARED else each.name


def _doubts(doubted: Sequence[Named]) -> Iterator[Linked]:
    """The configurations of which a side has times in doubt, with its warnings."""

    def warned(each: Named) -> str:
        codes = {code for side in "ab" for code in (each.row[f"{side}_warnings"] or "").split(";") if in_doubt([code])}
        return f"{each.name} ({', '.join(sorted(codes))})"

    if doubted:
        yield linked("By warnings on a side: ", *listed(doubted, "ratio", warned), ".")


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
