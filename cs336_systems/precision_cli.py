"""Command line of the precision study; PyTorch is imported only once the arguments have been understood."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from cs336_systems.config import Device

if TYPE_CHECKING:
    from cs336_systems.precision_study import Accumulation, ObservedDtype


DeviceChoice = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionArguments:
    """Show what accumulation and autocast do to precision, as observed on this machine."""

    device: DeviceChoice = "auto"
    """Where to observe autocast; auto is the CPU, and the GPU too where there is one."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print JSON instead of tables."""
    output: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Directory to write both tables to, as CSV, Markdown, LaTeX and Typst; nothing is written without it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study that the arguments ask for; return the exit status."""
    arguments = tyro.cli(PrecisionArguments, prog="precision.py", args=argv)
    from cs336_systems.precision_study import accumulation_study, dtype_study

    try:
        devices = choose_devices(arguments.device)
        if arguments.output is not None:
            arguments.output.mkdir(parents=True, exist_ok=True)
        sums, dtypes = accumulation_study(), dtype_study(devices)
        if arguments.output is not None:
            write_tables(sums, dtypes, arguments.output)
    except (ValueError, OSError) as error:
        print(f"precision.py: {error}", file=sys.stderr)
        return 2
    print_json(sums, dtypes) if arguments.json else print_tables(sums, dtypes)
    return 0


def choose_devices(choice: DeviceChoice) -> tuple[Device, ...]:
    """Devices to observe; raise ValueError where a GPU is asked for and there is none."""
    import torch

    has_gpu = torch.cuda.is_available()
    if choice == "auto":
        return (Device.CPU, Device.CUDA) if has_gpu else (Device.CPU,)
    if choice == "cuda" and not has_gpu:
        raise ValueError("--device cuda needs a GPU that this PyTorch can use, found none; try --device cpu")
    return (Device(choice),)


def print_tables(sums: Sequence["Accumulation"], dtypes: Sequence["ObservedDtype"]) -> None:
    """Print both tables to the terminal, with what their values say."""
    from rich.console import Console

    from cs336_systems.precision_tables import accumulation_table, dtype_table
    from cs336_systems.report.formats import to_rich

    console = Console()
    console.print(to_rich(accumulation_table(sums)))
    console.print(to_rich(dtype_table(dtypes)))


def print_json(sums: Sequence["Accumulation"], dtypes: Sequence["ObservedDtype"]) -> None:
    """Print every observed value, unrounded."""
    import msgspec
    import torch

    gpu = torch.cuda.get_device_name() if any(row.device is Device.CUDA for row in dtypes) else None
    observed = {"torch": str(torch.__version__), "gpu": gpu, "accumulation": sums, "dtypes": dtypes}
    print(msgspec.json.format(msgspec.json.encode(observed), indent=2).decode())


def write_tables(sums: Sequence["Accumulation"], dtypes: Sequence["ObservedDtype"], directory: Path) -> None:
    """Write `accumulation` and `dtypes` to the directory, in every format."""
    from cs336_systems.precision_tables import accumulation_table, dtype_table
    from cs336_systems.record import write_atomically
    from cs336_systems.report.formats import WRITERS, to_csv

    for name, table, rows in (
        ("accumulation", accumulation_table(sums), sums),
        ("dtypes", dtype_table(dtypes), dtypes),
    ):
        values = [asdict(row) for row in rows]
        texts = {"csv": to_csv(list(values[0]), [list(row.values()) for row in values])}
        texts |= {ending: write(table) for ending, write in WRITERS.items()}
        for ending, text in texts.items():
            write_atomically(directory / f"{name}.{ending}", text.encode())
