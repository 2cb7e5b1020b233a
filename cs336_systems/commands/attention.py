"""`cs336 attention`: the grid of attention alone."""

from dataclasses import replace

from cs336_systems.commands.outcome import FAILED, OK
from cs336_systems.commands.study import StudyArguments, measure_and_show, with_grid
from cs336_systems.measure.inputs import check_factory, source_of
from cs336_systems.record import Status
from cs336_systems.studies.attention_records import AttentionGrid, Implementation


@with_grid
class AttentionArguments(StudyArguments):
    """Time attention alone over head dimensions and context lengths, each way to compute it, and say what it holds.

    Without heads, as in the course's exercise. Cells that run out of memory or for which there is no kernel have rows
    of their own. Results go to OUTPUT/attention/NAME/, as JSON with every raw time, tables, plots and index.html.

    --own flash:FlashAttention adds yours, from flash.py in this directory; examples/flex_attention.py of the
    repository is one. Where it is over 10 times as far from float64 as PyTorch's kernel, it is marked WRONG, its times
    are in no table, and the exit status is 1. Without a backward (NotImplementedError) only forward is timed. The
    course's grid for it:
    --batch-size 1 --causal --precisions bf16 fp32 --d-heads 16 32 64 128 --context-lengths 128 256 512 1024 2048 4096
    8192 16384 32768 65536.
    """

    GRID, FOLDER = AttentionGrid, "attention"

    def grid(self, **others: object) -> AttentionGrid:
        """The grid that the flags mean, with the state of the user's source; ValueError if there is no such name."""
        grid: AttentionGrid = super().grid(**others)
        if grid.own is None:
            return grid
        check_factory(grid.own, "--own")
        return replace(grid, source=source_of(grid.own))


def run(arguments: AttentionArguments) -> int:
    """Measure the grid, write its record after every cell, then the tables, plots and page."""
    from cs336_systems.report.sections.attention import attention_section, write_attention, write_attention_record

    study = measure_and_show(
        arguments, write_attention, lambda study: [attention_section(study)], on_progress=write_attention_record
    )
    is_well = all(
        result.status.is_result
        and not (result.cell.implementation is Implementation.OWN and result.status is Status.UNAVAILABLE)
        for result in study.results
    )
    return OK if is_well else FAILED
