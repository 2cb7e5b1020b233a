"""`cs336 fusion`: what fusing does, op by op."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cs336_systems.commands.device import explain_cpu_fallback
from cs336_systems.commands.flags import study_name
from cs336_systems.commands.outcome import OK, checked
from cs336_systems.commands.study import StudyArguments, chosen_by_device, show_study
from cs336_systems.config import Precision
from cs336_systems.studies.fusion_records import FusionGrid, Op
from cs336_systems.sweep.store import make_writable

BY_DEVICE = {
    "batch_size": (16, 2), "context_length": (1024, 64), "width": (6400, 512), "num_heads": (25, 2), "d_head": (64, 16),
    "passes": (50, 10),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FusionArguments(StudyArguments):
    """Show what fusing does to GELU, softmax, RMSNorm and attention: written out, compiled, and PyTorch's own.

    For each, forward and backward: kernels launched, bytes moved, time, share of the memory bandwidth, error. Results
    go to OUTPUT/fusion/NAME/, as JSON with every raw time, tables and plots.
    """

    ops: tuple[Op, ...] = tuple(Op)
    """gelu (its tanh form), softmax, rms_norm, attention."""
    precisions: tuple[Precision, ...] = (Precision.FP32,)
    """Of inputs and products, without autocast: fp32, tf32, bf16, fp16."""
    batch_size: Annotated[int | None, chosen_by_device("INT", BY_DEVICE["batch_size"])] = None
    """Sequences in a batch."""
    context_length: Annotated[int | None, chosen_by_device("INT", BY_DEVICE["context_length"])] = None
    """Tokens in a sequence."""
    width: Annotated[int | None, chosen_by_device("INT", BY_DEVICE["width"])] = None
    """Elements of a token for gelu, softmax and rms_norm; softmax and rms_norm work along them."""
    num_heads: Annotated[int | None, chosen_by_device("INT", BY_DEVICE["num_heads"])] = None
    """Attention heads."""
    d_head: Annotated[int | None, chosen_by_device("INT", BY_DEVICE["d_head"])] = None
    """Width of one attention head (elements)."""
    passes: Annotated[int | None, chosen_by_device("INT", BY_DEVICE["passes"])] = None
    """Timed passes, one forward and one backward each."""
    warmup_passes: int = 5
    """Passes before the timed ones."""

    def grid(self) -> FusionGrid:
        """The grid that these flags mean; raise ValueError where they mean none."""
        return self.grid_of(FusionGrid, BY_DEVICE)

    def directory(self) -> Path:
        """Where the results go; raise ValueError for a name that is no plain directory name."""
        return self.output / "fusion" / study_name(self.name, self.precisions, self.device)


def run(arguments: FusionArguments) -> int:
    """Measure, print, and write."""
    explain_cpu_fallback(arguments.device)
    grid, directory = checked(arguments.grid), make_writable(checked(arguments.directory))
    from cs336_systems.report.sections.fusion import fusion_section, write_fusion
    from cs336_systems.studies.runner import run_study

    show_study(
        lambda status: run_study(grid, status),
        write_fusion,
        lambda study: fusion_section(study).tables,
        directory,
        as_json=arguments.json,
    )
    return OK
