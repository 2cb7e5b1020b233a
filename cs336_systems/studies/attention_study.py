"""The attention grid, from what to run to what came of it. Needs no torch: the workers have it."""

from collections.abc import Callable

from cs336_systems.record import Environment
from cs336_systems.studies.attention_records import AttentionGrid, AttentionStudy, CellResult
from cs336_systems.studies.records import Cell, CellStatus
from cs336_systems.studies.runner import Say, run_cells

MEASURE = "cs336_systems.studies.attention_cell:measure_rows"


def run_attention_study(
    grid: AttentionGrid,
    say: Say | None = None,
    on_progress: Callable[[AttentionStudy], object] = lambda _: None,
    measure: str = MEASURE,
) -> AttentionStudy:
    """Measure every cell; `on_progress` gets the study so far after each, so that an interrupted one is not lost."""

    def study(results: tuple[CellResult, ...], environment: Environment | None) -> AttentionStudy:
        return AttentionStudy(grid=grid, results=results, environment=environment)

    groups = [
        [Cell(label=cell.label, rows=(CellResult(cell=cell, status=CellStatus.OK),)) for cell in cells]
        for cells in grid.groups
    ]
    return study(
        *run_cells(
            grid, groups, measure, say, timeout_s=grid.timeout_s, on_rows=lambda *seen: on_progress(study(*seen))
        )
    )
