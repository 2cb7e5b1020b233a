"""The study of fusion, from what to run to what came of it. Needs no torch: the worker has it."""

from itertools import product

from cs336_systems.studies.fusion_records import FusionGrid, FusionStudy, Version, version_rows
from cs336_systems.studies.records import Cell
from cs336_systems.studies.runner import Say, run_cells

MEASURE = "cs336_systems.studies.fusion_cell:measure_rows"


def run_fusion_study(grid: FusionGrid, say: Say | None = None, measure: str = MEASURE) -> FusionStudy:
    """Measure every version of every operation; one that fails has rows that say so."""
    cells = [
        Cell(label=f"{op} {version} {precision}", rows=version_rows(grid, op, precision, version))
        for precision, op, version in product(dict.fromkeys(grid.precisions), dict.fromkeys(grid.ops), Version)
    ]
    rows, environment = run_cells(grid, [cells], measure, say)
    return FusionStudy(grid=grid, rows=rows, environment=environment)
