"""What a page says first of a ladder or a study: what its sections find, each with a link to the table below."""

from pathlib import Path

import pytest

from cs336_systems.report.page.collection import Climbed, Collection
from cs336_systems.report.page.whole import SELF, collection_page
from cs336_systems.report.page.write import TableBlock, to_html
from cs336_systems.report.results import Results
from cs336_systems.report.sections.ladder.rows import ladder_rows
from cs336_systems.studies.attention_records import Implementation
from cs336_systems.studies.fusion_records import Version
from tests.report import ceilings
from tests.report.ladders import make_ladder, make_records, shifted
from tests.report.page.parsed import Parsed
from tests.report.studies import make_cell, make_failed, make_fusion, make_result, make_row, make_study


def climbed():
    """0.8 s for the first rung and 0.05 s for the last; `compile` is off by half of the fall."""
    rungs = make_ladder()
    records = make_records(rungs, losses={"compile": shifted(0.5)})
    rows = tuple(ladder_rows(rungs, records, []))
    return Climbed(rungs=rungs, results=Results(records=records), rows=rows)


def attention():
    """Flash takes half of naive's time, which has no memory for twice the context."""
    flash = make_result(make_cell(Implementation.FLASH), forward_s=(0.0009, 0.001, 0.0011))
    return make_study(make_result(make_cell()), flash, make_failed(make_cell(context_length=2048)))


@pytest.mark.parametrize(
    ("kind", "make", "words"),
    [
        ("ladders", climbed, [["fused", "16.0"], ["Not credited", "compile"]]),
        ("attention", attention, [["as fast as naive", "flash 2.0"], ["naive runs out of memory", "context 2048"]]),
        ("ceilings", ceilings.make_whole, [["FLOPs per byte", "fp32", "bf16"]]),
        ("fusion", lambda: make_fusion(make_row(), make_row(version=Version.FUSED, times_s=(0.0005,))),
         [["gelu", "fused", "4.00"]]),
    ],
)  # fmt: skip
def test_what_stands_out_comes_first_and_leads_to_its_table(kind, make, words) -> None:
    page = collection_page(Collection(root=Path("mine"), **{kind: {SELF: make()}}))
    first, html = page.chapters[0], to_html(page)
    assert first.title == "Findings"
    told = {text: target for block in first.blocks for text, target in block.paragraphs}
    for each in words:
        assert any(all(word in text for word in each) for text in told), (each, told)
    tables = {b.id: b.table for c in page.chapters for b in c.blocks if isinstance(b, TableBlock)}
    assert all(text in tables[target].notes for text, target in told.items())
    assert {*told.values()} <= {target for _, target in Parsed(html).links}
