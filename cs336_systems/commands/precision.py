"""`precision.py`: what accumulation, layer norm and autocast do to precision."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from cs336_systems.commands.flags import DeviceChoice, Switch, explain_cpu_fallback, resolve_device
from cs336_systems.commands.outcome import OK, checked
from cs336_systems.commands.study import show_study
from cs336_systems.config import Device

if TYPE_CHECKING:
    from cs336_systems.report.progress import StatusLine
    from cs336_systems.studies.precision_records import PrecisionStudy


@dataclass(frozen=True, kw_only=True)
class PrecisionArguments:
    """Show what accumulation, layer norm and autocast do to precision, as observed on this machine."""

    device: DeviceChoice = "auto"
    """Where to observe autocast; auto is the CPU, and the GPU too where there is one."""
    json: Switch = False
    """Print JSON instead of tables."""
    output: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: write nothing)")] = None
    """Directory to write the tables to, as CSV, Markdown, LaTeX and Typst, all values as JSON, and index.html."""

    def devices(self) -> tuple[Device, ...]:
        """Devices to observe; raise ValueError where a GPU is asked for and there is none."""
        chosen = resolve_device(self.device)
        return (Device.CPU, Device.CUDA) if self.device == "auto" and chosen is Device.CUDA else (chosen,)


def run(arguments: PrecisionArguments) -> int:
    """Observe sums, layer norm and data types, print them, and write them into the directory if one is given."""
    explain_cpu_fallback(arguments.device)
    devices = checked(arguments.devices)
    if arguments.output is not None:
        arguments.output.mkdir(parents=True, exist_ok=True)
    from cs336_systems.report.sections.precision import precision_sections, write_precision

    def measure(status: "StatusLine") -> "PrecisionStudy":
        status("importing PyTorch")
        from cs336_systems.studies.precision import run_precision_study

        return run_precision_study(devices, status)

    show_study(
        measure,
        write_precision,
        lambda study: [table for section in precision_sections(study) for table in section.tables],
        arguments.output,
        "precision",
        as_json=arguments.json,
    )
    return OK
