"""The picture that README shows has the numbers that the page has now, and that README's text has."""

import json
import re
from pathlib import Path

from PIL import Image

from cs336_systems.record import load_records
from cs336_systems.report.results import Results
from cs336_systems.studies.ceilings_files import ceilings_beside, load_ceilings
from tests.report.page.grid import GRID

ROOT = Path(__file__).parents[3]


def shown() -> list[list[str]]:
    cells = Image.open(ROOT / "docs/pictures/page.png").text["cells"]
    return [[cell.strip() for cell in row] for row in json.loads(cells)]


def test_the_picture_has_the_cells_that_the_page_has_now() -> None:
    results = Results.load(load_records(GRID / "runs")[0], GRID, load_ceilings(ceilings_beside(GRID)))
    (table, *_) = results.steps.tables
    assert sorted(shown()) == sorted([cell.strip() for cell in row] for row in table.rows if row[1] == "512")


def test_readme_has_the_forecast_of_the_picture() -> None:
    ((size, context, precision, *cells),) = re.findall(
        r"(?m)^(small) +(512) (bf16) .* ([\d.]+) +([+-][\d.]+) +[\d,]+ ", (ROOT / "README.md").read_text()
    )
    (row,) = (row for row in shown() if row[:3] == [size, context, precision])
    assert set(cells) <= set(row)
