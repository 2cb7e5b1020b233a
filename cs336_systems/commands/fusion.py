"""`cs336 fusion`: what fusing does to single operations."""

from cs336_systems.commands.outcome import FAILED, OK
from cs336_systems.commands.study import StudyArguments, measure_and_show, with_grid
from cs336_systems.studies.fusion_records import FusionGrid


@with_grid
class FusionArguments(StudyArguments):
    """Show what fusing does to GELU, softmax, RMSNorm and attention: written out, compiled, and PyTorch's own.

    For each, forward and backward: kernels launched, bytes moved, time, share of the memory bandwidth, error. Results
    go to OUTPUT/fusion/NAME/, as JSON with every raw time, tables, plots and index.html.
    """

    GRID, FOLDER = FusionGrid, "fusion"


def run(arguments: FusionArguments) -> int:
    """Measure the grid, print the tables, and write them with the record and the plots."""
    from cs336_systems.report.sections.fusion import fusion_section, write_fusion

    study = measure_and_show(arguments, write_fusion, lambda study: [fusion_section(study)])
    return OK if all(row.status.is_result for row in study.rows) else FAILED
