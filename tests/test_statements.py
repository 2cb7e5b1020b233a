"""What README.md and data/README.md say in numbers is what the records and tables in data/ say."""

import re

import pytest

from tests.statements import data, readme
from tests.statements.documents import CLAIMS, Claim, TableClaim, markdown_table, read, unclaimed

DOCUMENTS = (readme.README, data.DATA)

SETTINGS = (
    r"Python 3\.\d+ or newer",
    r"\b(?:batch|context) \d+",
    r"between two synchronisations",
    r"of anybody's; two to compare",
)
"""Numbers that were chosen, not found; all others have a claim in tests/statements/."""


@pytest.mark.parametrize("claimed", CLAIMS, ids=[f"{item.compute.__wrapped__.__name__}" for item in CLAIMS])
def test_the_document_says_what_the_file_has(claimed: Claim | TableClaim) -> None:
    assert list(claimed.problems(read(claimed.document))) == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_figure_has_a_source(document: str) -> None:
    assert unclaimed(document, read(document), SETTINGS) == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_any_figure_that_is_changed_or_added_is_found(document: str) -> None:
    text = read(document)
    for new in ("It is 17.3 % faster.", "It takes a third of the time.", "Of 512 runs."):
        assert len(unclaimed(document, f"{text}\n\n{new}", SETTINGS)) == 1
    own = [item for item in CLAIMS if item.document == document]
    for item in own:
        for start, end in item.spans(text):
            for match in re.finditer(r"[1-9](?=[^\w]|$)", text[start:end]):
                place = start + match.start()
                changed = f"{text[:place]}{(int(match[0]) + 1) % 10}{text[place + 1 :]}"
                assert list(item.problems(changed)), f"{text[start:end]!r} may say anything"


def test_the_table_said_to_have_the_predicted_peak_has_it() -> None:
    (path,) = re.findall(r"predicted peak beside the measured one, as\s+\[[^]]*\]\(data/([^)]*)\)", read(readme.README))
    for row in markdown_table(path):
        assert float(row["predicted (GiB)"]) == pytest.approx(float(row["peak (GiB)"]), rel=0.01)
