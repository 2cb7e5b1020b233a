"""`cs336 attention`, `fusion` and `precision`, and what all studies share: flags, files and printing."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

import tyro

from cs336_systems.commands.flags import (
    DeviceChoice,
    DeviceFlag,
    Flags,
    explain_cpu_fallback,
    look_at_machine,
    resolve_device,
    study_name,
    unset,
    with_flags_of,
)
from cs336_systems.commands.outcome import FAILED, OK, checked
from cs336_systems.commands.results import write_page_of
from cs336_systems.config import Device
from cs336_systems.files import encode_json, write_atomically
from cs336_systems.measure.inputs import check_factory, source_of
from cs336_systems.settings import declared
from cs336_systems.studies.operators import AttentionGrid, FusionGrid
from cs336_systems.sweep.store import make_writable, time_stamp
from cs336_systems.text import print_aside, print_line

if TYPE_CHECKING:
    from cs336_systems.report.progress import StatusLine
    from cs336_systems.report.results import Study
    from cs336_systems.studies.records import PrecisionStudy

ArgumentsT = TypeVar("ArgumentsT", bound="StudyArguments")
StudyT = TypeVar("StudyT", bound="Study")


@dataclass(frozen=True, kw_only=True)
class StudyArguments(Flags):
    """Flags that every study has."""

    GRID: ClassVar[type]
    """Class of the grid, whose declared settings become flags."""
    FOLDER: ClassVar[str]
    """Directory of all studies of this kind, below the output directory."""
    UNFINISHED: ClassVar[str | None] = None
    """File of what is measured so far, if not the record itself."""
    device: DeviceFlag = "auto"
    seed: int = 0
    """Seed of the inputs."""
    name: Annotated[str | None, unset("NAME", "precisions and device")] = None
    """Name of the directory."""
    output: Path = Path("data")
    """Directory for results."""

    def grid(self, **others: Any) -> Any:  # noqa: ANN401 (each study has its own)
        """The grid that the flags mean, with other fields; raise ValueError if there is no such grid."""
        device = resolve_device(self.device)
        defaults = {
            each.name: setting.by_device.gpu if device is Device.CUDA else setting.by_device.cpu
            for each, setting in declared(self.GRID)
            if setting.by_device is not None
        }
        return self.GRID(**defaults | self.given() | others | {"device": device, "seed": self.seed})

    def directory(self) -> Path:
        """Where the results go; raise ValueError for a name that is no plain directory name."""
        return self.output / self.FOLDER / study_name(self.name, self.precisions, self.device)

    def run(self) -> int:
        """Measure the grid, with the record written after each cell, and write the results and print them."""
        explain_cpu_fallback(self.device)
        grid, directory = checked(self.grid), make_writable(checked(self.directory))
        look_at_machine(resolve_device(self.device))
        record = directory / (self.UNFINISHED or f"{self.FOLDER}.json")

        def measure(status: "StatusLine") -> Any:  # noqa: ANN401
            from cs336_systems.studies.runner import run_study

            study = run_study(grid, status, lambda so_far: write_atomically(record, encode_json(so_far)))
            if self.UNFINISHED is not None:
                keep_earlier(directory / f"{self.FOLDER}.json", encode_json(study))
            return study

        study = show_study(measure, directory)
        if self.UNFINISHED is not None:
            record.unlink(missing_ok=True)
        return OK if all(status.is_result for status in study.statuses) else FAILED


def keep_earlier(present: Path, data: bytes) -> None:
    """Copy the study that is there, if it is another, to a file beside it that is named after the time, and say so."""
    if present.is_file() and (earlier := present.read_bytes()) != data:
        kept = present.with_name(f"{present.stem}-before-{time_stamp()}{present.suffix}")
        write_atomically(kept, earlier)
        print_aside(f"the earlier {present.stem} are kept in {kept}")


def with_grid(kind: type[ArgumentsT]) -> type[ArgumentsT]:
    """Make a class of arguments a dataclass with a flag for each setting of its grid."""
    return with_flags_of(kind.GRID)(kind)


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


@with_grid
class FusionArguments(StudyArguments):
    """Show what fusing does to GELU, softmax, RMSNorm and attention: written out, compiled, and PyTorch's own.

    For each, forward and backward: kernels launched, bytes moved, time, share of the memory bandwidth, error. Results
    go to OUTPUT/fusion/NAME/, as JSON with every raw time, tables, plots and index.html.
    """

    GRID, FOLDER = FusionGrid, "fusion"


@dataclass(frozen=True, kw_only=True)
class PrecisionArguments:
    """Show what accumulation, layer norm and autocast do to precision, as observed on this machine."""

    device: DeviceChoice = "auto"
    """Where to observe autocast; auto is the CPU, and the GPU too where there is one."""
    output: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: write nothing)")] = None
    """Directory to write the tables to, as CSV, Markdown, LaTeX and Typst, all values as JSON, and index.html."""

    def devices(self) -> tuple[Device, ...]:
        """Devices to observe; raise ValueError where a GPU is asked for and there is none."""
        chosen = resolve_device(self.device)
        return (Device.CPU, Device.CUDA) if self.device == "auto" and chosen is Device.CUDA else (chosen,)

    def run(self) -> int:
        """Observe sums, layer norm and data types, print them, and write them into the directory if one is given."""
        explain_cpu_fallback(self.device)
        devices = checked(self.devices)
        if self.output is not None:
            self.output.mkdir(parents=True, exist_ok=True)

        def measure(status: "StatusLine") -> "PrecisionStudy":
            status("importing PyTorch")
            from cs336_systems.studies.precision import run_precision_study

            return run_precision_study(devices, status)

        show_study(measure, self.output)
        return OK


def run(arguments: AttentionArguments | FusionArguments | PrecisionArguments) -> int:
    """Run the command that these are the arguments of."""
    return arguments.run()


def show_study(measure: Callable[["StatusLine"], StudyT], directory: Path | None) -> StudyT:
    """Measure, showing progress; write the results into the directory, if one is given; print and return them."""
    from cs336_systems.report.page.chapters import Directory
    from cs336_systems.report.progress import StatusLine
    from cs336_systems.report.results import StudyResults
    from cs336_systems.report.sections.study import all_tables
    from cs336_systems.report.terminal import print_table

    with StatusLine() as status:
        study = measure(status)
        results = StudyResults(study)
        if directory is not None:
            status("drawing and writing")
            results.write(directory)
            page, _ = write_page_of(Directory(path=directory, study=results), status)
    for table in all_tables(results.sections):
        print_table(table, directory)
    if directory is not None:
        print_line(f"results: {directory}")
        print_line(f"page: {page}")
    return study
