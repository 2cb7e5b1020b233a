"""What the commands of all studies share: flags, and the way from measuring to files and printed tables."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

from cs336_systems.commands.flags import (
    DeviceFlag,
    Flags,
    Switch,
    explain_cpu_fallback,
    resolve_device,
    study_name,
    unset,
    with_flags_of,
)
from cs336_systems.commands.outcome import checked, json_alone
from cs336_systems.commands.results import write_collection_page
from cs336_systems.config import Device
from cs336_systems.files import encode_json
from cs336_systems.settings import declared
from cs336_systems.sweep.store import make_writable
from cs336_systems.text import print_aside, print_line

if TYPE_CHECKING:
    from cs336_systems.report.progress import StatusLine
    from cs336_systems.report.section import Table

ArgumentsT = TypeVar("ArgumentsT", bound="StudyArguments")
StudyT = TypeVar("StudyT")


@dataclass(frozen=True, kw_only=True)
class StudyArguments(Flags):
    """Flags that every study has."""

    GRID: ClassVar[type]
    """Class of the grid, whose declared settings become flags."""
    FOLDER: ClassVar[str]
    """Directory of all studies of this kind, below the output directory."""
    device: DeviceFlag = "auto"
    seed: int = 0
    """Seed of the inputs."""
    name: Annotated[str | None, unset("NAME", "precisions and device")] = None
    """Name of the directory."""
    output: Path = Path("data")
    """Directory for results."""
    json: Switch = False
    """Print JSON instead of tables."""

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


def with_grid(kind: type[ArgumentsT]) -> type[ArgumentsT]:
    """Make a class of arguments a dataclass with a flag for each setting of its grid."""
    return with_flags_of(kind.GRID)(kind)


def measure_and_show(
    arguments: StudyArguments,
    write: Callable[[StudyT, Path], object],
    tables: Callable[[StudyT], Iterable["Table"]],
    on_progress: Callable[[StudyT, Path], object] = lambda *_: None,
) -> StudyT:
    """Measure the grid of the arguments, write the results, print them, and return the study.

    `on_progress` gets the study so far and its directory after each cell.
    """
    explain_cpu_fallback(arguments.device)
    grid, directory = checked(arguments.grid), make_writable(checked(arguments.directory))

    def measure(status: "StatusLine") -> StudyT:
        from cs336_systems.studies.runner import run_study

        study: StudyT = run_study(grid, status, lambda study: on_progress(study, directory))
        return study

    return show_study(measure, write, tables, directory, arguments.FOLDER, as_json=arguments.json)


def show_study(
    measure: Callable[["StatusLine"], StudyT],
    write: Callable[[StudyT, Path], object],
    tables: Callable[[StudyT], Iterable["Table"]],
    directory: Path | None,
    kind: str,
    *,
    as_json: bool,
    warnings: Callable[[StudyT], Iterable[str]] = lambda _: (),
    **others: object,
) -> StudyT:
    """Measure, showing progress; write the results into the directory, if one is given; print and return them.

    `kind` is the field of `Collection` in which the page has such studies; `others` go into other fields of it.
    """
    from cs336_systems.report.progress import StatusLine
    from cs336_systems.report.terminal import print_table

    with json_alone(as_json) as print_json:
        with StatusLine() as status:
            study = measure(status)
            if directory is not None:
                status("drawing and writing")
                write(study, directory)
                page = _write_page(directory, status, {kind: study, **others})
        for warning in warnings(study):
            print_aside(f"warning: {warning}")
        if print_json is not None:
            print_json(encode_json(study))
        else:
            for table in tables(study):
                print_table(table, directory)
        if directory is not None:
            print_line(f"results: {directory}")
            print_line(f"page: {page}")
    return study


def _write_page(directory: Path, status: "StatusLine", parts: Mapping[str, object]) -> Path:
    """Write the page of one study; `parts` are values of fields of `Collection`, or None for what is absent."""
    from cs336_systems.report.page.chapters import Collection

    fields: dict[str, Any] = {name: {Path(): part} for name, part in parts.items() if part is not None}
    return write_collection_page(Collection(root=directory, **fields), status)
