"""The page of the committed grid of 30 runs, made once."""

import time

import pytest

from cs336.record import load_records
from cs336.report.page.chapters import page_of
from cs336.report.page.directory import Directory
from cs336.report.page.html import to_html
from cs336.report.results import Results
from cs336.studies.ceilings_files import ceilings_beside, load_ceilings
from tests.report.page.grid import GRID


@pytest.fixture(scope="session")
def grid_page():
    """The page as text, and the processor time that it took."""
    results = Results.load(
        load_records(GRID / "runs")[0], GRID, load_ceilings(ceilings_beside(GRID))
    )
    begin_s = time.process_time()
    page = to_html(page_of(Directory(path=GRID, results=results)))
    return page, time.process_time() - begin_s
