"""`cs336 attention`: the grid of attention alone."""

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cs336_systems.commands.device import DeviceFlag, explain_cpu_fallback, resolve_device
from cs336_systems.commands.flags import Switch, study_name, unset, value_or
from cs336_systems.commands.outcome import FAILED, OK, checked, json_alone
from cs336_systems.config import Device, Precision
from cs336_systems.studies.attention_records import AttentionGrid, AttentionStudy, Implementation, encode_study
from cs336_systems.sweep.store import make_writable

GPU_D_HEADS, CPU_D_HEADS = (16, 32, 64, 128), (16, 32)
GPU_CONTEXT_LENGTHS, CPU_CONTEXT_LENGTHS = (256, 1024, 4096, 8192, 16384), (64, 256)
GPU_IMPLEMENTATIONS = (
    Implementation.NAIVE,
    Implementation.COMPILED,
    Implementation.FLASH,
    Implementation.EFFICIENT,
    Implementation.CUDNN,
    Implementation.MATH,
)
CPU_IMPLEMENTATIONS = (Implementation.NAIVE, Implementation.COMPILED, Implementation.SDPA)


@dataclass(frozen=True, kw_only=True)
class AttentionArguments:
    """Time attention alone over head dimensions and context lengths, each way to compute it, and say what it holds.

    Without heads, as in the course's exercise. Cells that run out of memory or for which there is no kernel have rows
    of their own. Results go to OUTPUT/attention/NAME/, as JSON with every raw time, tables and plots.
    """

    implementations: Annotated[
        tuple[Implementation, ...] | None,
        unset("NAME [NAME ...]", "naive compiled flash efficient cudnn math on a GPU, naive compiled sdpa on a CPU"),
    ] = None
    """naive: written out. compiled: that, by torch.compile. sdpa: PyTorch's choice. flash, efficient, cudnn, math: one
    of its kernels."""
    d_heads: Annotated[tuple[int, ...] | None, unset("INT [INT ...]", "16 32 64 128 on a GPU, 16 32 on a CPU")] = None
    """Width of queries, keys and values (elements)."""
    context_lengths: Annotated[
        tuple[int, ...] | None, unset("INT [INT ...]", "256 1024 4096 8192 16384 on a GPU, 64 256 on a CPU")
    ] = None
    """Tokens in a sequence."""
    precisions: tuple[Precision, ...] = (Precision.FP32,)
    """Of inputs and products, without autocast: fp32, tf32, bf16, fp16."""
    batch_size: int = 8
    """Sequences in a batch."""
    causal: Switch = False
    """Hide from each token those that follow it."""
    passes: Annotated[int | None, unset("INT", "100 on a GPU, 10 on a CPU")] = None
    """Timed passes of each cell, one forward and one backward each."""
    warmup_passes: int = 10
    """Passes before the timed ones."""
    timeout_s: float = 600.0
    """Longest time for one cell (seconds)."""
    device: DeviceFlag = "auto"
    seed: int = 0
    """Seed of the inputs."""
    name: Annotated[str | None, unset("NAME", "precisions and device")] = None
    """Name of the directory."""
    output: Path = Path("data")
    """Directory for results."""
    json: Switch = False
    """Print JSON instead of tables."""

    def grid(self) -> AttentionGrid:
        """The grid that these flags mean; raise ValueError where they mean none."""
        device = resolve_device(self.device)
        on_gpu = device is Device.CUDA
        return AttentionGrid(
            device=device,
            batch_size=self.batch_size,
            d_heads=value_or(self.d_heads, GPU_D_HEADS if on_gpu else CPU_D_HEADS),
            context_lengths=value_or(self.context_lengths, GPU_CONTEXT_LENGTHS if on_gpu else CPU_CONTEXT_LENGTHS),
            implementations=value_or(self.implementations, GPU_IMPLEMENTATIONS if on_gpu else CPU_IMPLEMENTATIONS),
            precisions=self.precisions,
            causal=self.causal,
            passes=value_or(self.passes, 100 if on_gpu else 10),
            warmup_passes=self.warmup_passes,
            timeout_s=self.timeout_s,
            seed=self.seed,
        )

    def directory(self) -> Path:
        """Where the results go; raise ValueError for a name that is no plain directory name."""
        return self.output / "attention" / study_name(self.name, self.precisions, self.device)


def run(arguments: AttentionArguments) -> int:
    """Measure the grid, write its record after every cell, then the tables and plots."""
    explain_cpu_fallback(arguments.device)
    grid, directory = checked(arguments.grid), make_writable(checked(arguments.directory))
    from cs336_systems.report.attention import attention_tables, write_attention, write_attention_record
    from cs336_systems.report.status_line import StatusLine
    from cs336_systems.report.terminal import print_table, say
    from cs336_systems.studies.attention_study import run_attention_study

    cells = list(itertools.chain.from_iterable(grid.groups))

    def measured(study: AttentionStudy) -> None:
        write_attention_record(study, directory)
        if (done := len(study.results)) < len(cells):
            status(cells[done].label, done, len(cells))

    with json_alone(arguments.json) as print_json:
        with StatusLine() as status:
            status(f"importing PyTorch, then {cells[0].label}", 0, len(cells))
            study = run_attention_study(grid, measured)
            status("drawing and writing")
            write_attention(study, directory)
        if print_json is not None:
            print_json(encode_study(study))
        else:
            for table in attention_tables(study):
                print_table(table, directory)
        say(f"results: {directory}")
    return OK if all(result.status.is_result for result in study.results) else FAILED
