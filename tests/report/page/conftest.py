"""The page of the committed grid of 30 runs, made once."""

import time

import pytest

from cs336_systems.measure.nvml import Gpu
from cs336_systems.record import load_records
from cs336_systems.report.page.contents import sweep_page
from cs336_systems.report.page.write import to_html
from cs336_systems.report.results import Results
from cs336_systems.studies.ceilings_files import ceilings_beside, load_ceilings
from tests.report.page.grid import GRID


@pytest.fixture(scope="session")
def grid_page():
    """The page as text, and the processor time that it took."""
    records, _ = load_records(GRID / "runs")
    ceilings = load_ceilings(ceilings_beside(GRID))
    begin_s = time.process_time()
    page = to_html(sweep_page(Results.load(records, GRID), GRID, ceilings))
    return page, time.process_time() - begin_s


@pytest.fixture
def two_gpus(monkeypatch):
    """Two GPUs that commands see: the committed runs on several ranks had them."""
    gpus = [Gpu(index=i, uuid=f"GPU-{i}", name="NVIDIA H200", memory_bytes=2**37, driver="580.1") for i in range(2)]
    monkeypatch.setattr("cs336_systems.commands.flags.visible_gpus", lambda: gpus)
