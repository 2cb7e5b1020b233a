"""The page of a comparison: the verdicts first, then the rows that they come from."""

from pathlib import Path

from cs336_systems.report.page.collection import Collection, block_id
from cs336_systems.report.page.provenance import conditions_and_times
from cs336_systems.report.page.studies import section_blocks
from cs336_systems.report.page.write import Chapter, Prose
from cs336_systems.text import inert_line


def comparison_chapters(collection: Collection, directory: Path) -> list[Chapter]:
    """What the table finds and what was left out, then both sides with their pictures."""
    compared = collection.comparisons[directory]
    where = [" and ".join(compared.sides.names)] if compared.sides.records else []
    told = [conditions_and_times([record for side in compared.records for record in side])]
    source = inert_line("; ".join([*where, *told]))
    texts = [*(text for table in compared.section.tables for text in table.findings), *compared.left_out]
    verdicts = Prose(paragraphs=[(inert_line(text), "") for text in texts])
    blocks = list(section_blocks(compared.section, collection, directory, source))
    return [
        Chapter(id=block_id(directory, "verdicts"), title="B against A", blocks=[verdicts], source=source),
        Chapter(id=block_id(directory, "rows"), title="Both sides", blocks=blocks),
    ]
