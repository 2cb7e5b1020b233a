"""`precision.py`: what accumulation and autocast do to precision."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from cs336_systems.commands.device import DeviceChoice, explain_cpu_fallback, resolve_device
from cs336_systems.commands.flags import Switch
from cs336_systems.commands.outcome import OK, checked, json_alone
from cs336_systems.config import Device
from cs336_systems.studies.precision_records import encode_study


@dataclass(frozen=True, kw_only=True)
class PrecisionArguments:
    """Show what accumulation and autocast do to precision, as observed on this machine."""

    device: DeviceChoice = "auto"
    """Where to observe autocast; auto is the CPU, and the GPU too where there is one."""
    json: Switch = False
    """Print JSON instead of tables."""
    output: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: write nothing)")] = None
    """Directory to write both tables to, as CSV, Markdown, LaTeX and Typst, and all values as JSON."""

    def devices(self) -> tuple[Device, ...]:
        """Devices to observe; raise ValueError where a GPU is asked for and there is none."""
        chosen = resolve_device(self.device)
        return (Device.CPU, Device.CUDA) if self.device == "auto" and chosen is Device.CUDA else (chosen,)


def run(arguments: PrecisionArguments) -> int:
    """Print, and where asked write, what precision does to sums and types."""
    explain_cpu_fallback(arguments.device)
    devices = checked(arguments.devices)
    if arguments.output is not None:
        arguments.output.mkdir(parents=True, exist_ok=True)
    from cs336_systems.report.status_line import StatusLine
    from cs336_systems.report.terminal import say

    with json_alone(arguments.json) as print_json:
        with StatusLine() as status:
            status("importing PyTorch")
            from cs336_systems.report.precision import print_tables, write_precision
            from cs336_systems.studies.precision import run_precision_study

            study = run_precision_study(devices, status)
        if arguments.output is not None:
            write_precision(study, arguments.output)
        if print_json is not None:
            print_json(encode_study(study))
        else:
            print_tables(study, arguments.output)
        if arguments.output is not None:
            say(f"results: {arguments.output}")
    return OK
