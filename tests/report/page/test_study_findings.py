"""What a page says of a ladder or a study is what its hand-made records were made of, with links to those cells."""

from pathlib import Path

from cs336_systems.report.page.collection import Climbed, Collection
from cs336_systems.report.page.whole import SELF, collection_page
from cs336_systems.report.page.write import Linked, to_html
from cs336_systems.report.results import Results
from cs336_systems.report.sections.ladder.rows import ladder_rows
from cs336_systems.studies.attention_records import Implementation
from cs336_systems.studies.fusion_records import Version
from tests.report import ceilings
from tests.report.ladders import make_ladder, make_records, shifted
from tests.report.page.parsed import Parsed
from tests.report.studies import make_cell, make_failed, make_fusion, make_result, make_row, make_study


def told(**parts):
    """The sentences of the findings, and for each link its text and that of the cell it leads to."""
    page = collection_page(Collection(root=Path("mine"), **{name: {SELF: part} for name, part in parts.items()}))
    first, found = page.chapters[0], Parsed(to_html(page))
    assert first.title == "Findings"
    linked = [(text, found.cells[target][0]) for text, target in found.links if target in found.cells]
    assert linked
    assert all(text == cell for text, cell in linked)
    return [own.text if isinstance(own, Linked) else own[0] for own in first.blocks[0].paragraphs]


def test_a_ladder_says_its_fastest_rung_its_gains_and_what_is_not_credited() -> None:
    rungs = make_ladder()
    records = make_records(rungs, losses={"compile": shifted(0.5)})
    rows = tuple(ladder_rows(rungs, records, []))
    sentences = told(ladders=Climbed(rungs=rungs, results=Results(records=records), rows=rows))
    assert sentences[0].startswith("The fastest rung is fused: 50 ± ")
    assert "16.0" in sentences[0]  # 0.8 s over 0.05 s
    (refused,) = (own for own in sentences if own.startswith("Nothing is credited"))
    assert "compile" in refused
    gains = [own.partition(" ")[0] for own in sentences if own.endswith("as fast as the rung before.")]
    assert gains[0] == "fused"  # 8 times as fast as bf16, the last that is credited
    assert not any("slower" in own for own in sentences)


def test_attention_says_the_order_of_the_implementations_and_what_runs_out_of_memory() -> None:
    flash = make_result(make_cell(Implementation.FLASH), forward_s=(0.0009, 0.001, 0.0011))
    lost = make_failed(make_cell(context_length=2048))
    sentences = told(attention=make_study(make_result(make_cell()), flash, lost))
    forward = sentences[0]
    assert "d_head 64 and context 1024" in forward
    assert forward.index("flash 1.0") < forward.index("naive 2.00")
    assert [own for own in sentences if own.startswith("naive at d_head 64 and context 2048: out of memory")]


def test_ceilings_say_the_least_and_the_largest_share_of_the_data_sheet() -> None:
    sentences = told(ceilings=ceilings.make_whole())
    assert sentences[0].startswith("Matrix products reach 74.6")  # 50 of 67 TFLOP/s in fp32, 800 of 989.5 in bf16
    assert "80.8" in sentences[0]


def test_fusion_says_the_largest_gain_and_what_is_slower() -> None:
    fused = make_row(version=Version.FUSED, times_s=(0.0005,))
    compiled = make_row(version=Version.COMPILED, times_s=(0.004,))
    gain, loss = told(fusion=make_fusion(make_row(), fused, compiled))
    assert "gelu fused, forward, fp32: 4.00" in gain
    assert "gelu compiled, forward, fp32: 0.500" in loss
    assert loss.endswith("slower.")
