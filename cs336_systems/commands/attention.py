"""`cs336 attention`: the grid of attention alone."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cs336_systems.commands.device import explain_cpu_fallback
from cs336_systems.commands.flags import Switch, study_name
from cs336_systems.commands.outcome import FAILED, OK, checked
from cs336_systems.commands.study import StudyArguments, chosen_by_device, show_study
from cs336_systems.config import Precision
from cs336_systems.studies.attention_records import AttentionGrid, Implementation
from cs336_systems.sweep.store import make_writable

GPU_IMPLEMENTATIONS = tuple(name for name in Implementation if name is not Implementation.SDPA)
CPU_IMPLEMENTATIONS = (Implementation.NAIVE, Implementation.COMPILED, Implementation.SDPA)
BY_DEVICE = {
    "implementations": (GPU_IMPLEMENTATIONS, CPU_IMPLEMENTATIONS),
    "d_heads": ((16, 32, 64, 128), (16, 32)),
    "context_lengths": ((256, 1024, 4096, 8192, 16384), (64, 256)),
    "passes": (100, 10),
}


@dataclass(frozen=True, kw_only=True)
class AttentionArguments(StudyArguments):
    """Time attention alone over head dimensions and context lengths, each way to compute it, and say what it holds.

    Without heads, as in the course's exercise. Cells that run out of memory or for which there is no kernel have rows
    of their own. Results go to OUTPUT/attention/NAME/, as JSON with every raw time, tables and plots.
    """

    implementations: Annotated[
        tuple[Implementation, ...] | None, chosen_by_device("NAME [NAME ...]", BY_DEVICE["implementations"])
    ] = None
    """naive: written out. compiled: that, by torch.compile. sdpa: PyTorch's choice. flash, efficient, cudnn, math: one
    of its kernels."""
    d_heads: Annotated[tuple[int, ...] | None, chosen_by_device("INT [INT ...]", BY_DEVICE["d_heads"])] = None
    """Width of queries, keys and values (elements)."""
    context_lengths: Annotated[
        tuple[int, ...] | None, chosen_by_device("INT [INT ...]", BY_DEVICE["context_lengths"])
    ] = None
    """Tokens in a sequence."""
    precisions: tuple[Precision, ...] = (Precision.FP32,)
    """Of inputs and products, without autocast: fp32, tf32, bf16, fp16."""
    batch_size: int = 8
    """Sequences in a batch."""
    causal: Switch = False
    """Hide from each token those that follow it."""
    passes: Annotated[int | None, chosen_by_device("INT", BY_DEVICE["passes"])] = None
    """Timed passes of each cell, one forward and one backward each."""
    warmup_passes: int = 10
    """Passes before the timed ones."""
    timeout_s: float = 600.0
    """Longest time for one cell (seconds)."""

    def grid(self) -> AttentionGrid:
        """The grid that these flags mean; raise ValueError where they mean none."""
        return self.grid_of(AttentionGrid, BY_DEVICE)

    def directory(self) -> Path:
        """Where the results go; raise ValueError for a name that is no plain directory name."""
        return self.output / "attention" / study_name(self.name, self.precisions, self.device)


def run(arguments: AttentionArguments) -> int:
    """Measure the grid, write its record after every cell, then the tables and plots."""
    explain_cpu_fallback(arguments.device)
    grid, directory = checked(arguments.grid), make_writable(checked(arguments.directory))
    from cs336_systems.report.sections.attention import attention_tables, write_attention, write_attention_record
    from cs336_systems.studies.runner import run_study

    study = show_study(
        lambda status: run_study(grid, status, lambda study: write_attention_record(study, directory)),
        write_attention,
        attention_tables,
        directory,
        as_json=arguments.json,
    )
    return OK if all(result.status.is_result for result in study.results) else FAILED
