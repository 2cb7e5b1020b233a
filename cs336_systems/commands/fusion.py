"""`cs336 fusion`: what fusing does, op by op."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cs336_systems.commands.device import DeviceFlag, explain_cpu_fallback, resolve_device
from cs336_systems.commands.flags import Switch, study_name, unset, value_or
from cs336_systems.commands.outcome import OK, checked, json_alone
from cs336_systems.config import Device, Precision
from cs336_systems.studies.fusion_records import FusionGrid, Op, encode_study
from cs336_systems.sweep.store import make_writable


@dataclass(frozen=True, kw_only=True)
class FusionArguments:
    """Show what fusing does to GELU, softmax, RMSNorm and attention: written out, compiled, and PyTorch's own.

    For each, forward and backward: kernels launched, bytes moved, time, share of the memory bandwidth, error. Results
    go to OUTPUT/fusion/NAME/, as JSON with every raw time, tables and plots.
    """

    ops: tuple[Op, ...] = tuple(Op)
    """gelu (its tanh form), softmax, rms_norm, attention."""
    precisions: tuple[Precision, ...] = (Precision.FP32,)
    """Of inputs and products, without autocast: fp32, tf32, bf16, fp16."""
    batch_size: Annotated[int | None, unset("INT", "16 on a GPU, 2 on a CPU")] = None
    """Sequences in a batch."""
    context_length: Annotated[int | None, unset("INT", "1024 on a GPU, 64 on a CPU")] = None
    """Tokens in a sequence."""
    width: Annotated[int | None, unset("INT", "6400 on a GPU, 512 on a CPU")] = None
    """Elements of a token for gelu, softmax and rms_norm; softmax and rms_norm work along them."""
    num_heads: Annotated[int | None, unset("INT", "25 on a GPU, 2 on a CPU")] = None
    """Attention heads."""
    d_head: Annotated[int | None, unset("INT", "64 on a GPU, 16 on a CPU")] = None
    """Width of one attention head (elements)."""
    passes: Annotated[int | None, unset("INT", "50 on a GPU, 10 on a CPU")] = None
    """Timed passes, one forward and one backward each."""
    warmup_passes: int = 5
    """Passes before the timed ones."""
    device: DeviceFlag = "auto"
    seed: int = 0
    """Seed of the inputs."""
    name: Annotated[str | None, unset("NAME", "precisions and device")] = None
    """Name of the directory."""
    output: Path = Path("data")
    """Directory for results."""
    json: Switch = False
    """Print JSON instead of tables."""

    def grid(self) -> FusionGrid:
        """The grid that these flags mean; raise ValueError where they mean none."""
        device = resolve_device(self.device)
        on_gpu = device is Device.CUDA
        return FusionGrid(
            device=device,
            ops=self.ops,
            precisions=self.precisions,
            batch_size=value_or(self.batch_size, 16 if on_gpu else 2),
            context_length=value_or(self.context_length, 1024 if on_gpu else 64),
            width=value_or(self.width, 6400 if on_gpu else 512),
            num_heads=value_or(self.num_heads, 25 if on_gpu else 2),
            d_head=value_or(self.d_head, 64 if on_gpu else 16),
            passes=value_or(self.passes, 50 if on_gpu else 10),
            warmup_passes=self.warmup_passes,
            seed=self.seed,
        )

    def directory(self) -> Path:
        """Where the results go; raise ValueError for a name that is no plain directory name."""
        return self.output / "fusion" / study_name(self.name, self.precisions, self.device)


def run(arguments: FusionArguments) -> int:
    """Measure in this process, print, and write."""
    explain_cpu_fallback(arguments.device)
    grid, directory = checked(arguments.grid), make_writable(checked(arguments.directory))
    from cs336_systems.report.status_line import StatusLine
    from cs336_systems.report.terminal import print_table, say

    with json_alone(arguments.json) as print_json:
        with StatusLine() as status:
            status("importing PyTorch")
            from cs336_systems.studies.fusion_study import run_fusion_study

            study = run_fusion_study(grid, status)
            status("drawing and writing")
            from cs336_systems.report.fusion import fusion_tables, write_fusion

            write_fusion(study, directory)
        if print_json is not None:
            print_json(encode_study(study))
        else:
            for table in fusion_tables(study):
                print_table(table, directory)
        say(f"results: {directory}")
    return OK
