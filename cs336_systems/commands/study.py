"""What the commands of all studies share: flags, and the way from measuring to files and printed tables."""

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar

from cs336_systems.commands.device import DeviceFlag, resolve_device
from cs336_systems.commands.flags import Switch, unset
from cs336_systems.commands.outcome import json_alone
from cs336_systems.config import Device
from cs336_systems.files import encode_json
from cs336_systems.text import inert_line

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from cs336_systems.report.status_line import StatusLine
    from cs336_systems.report.table import Table

GridT = TypeVar("GridT", bound="DataclassInstance")
StudyT = TypeVar("StudyT")
ByDevice: TypeAlias = Mapping[str, tuple[Any, Any]]
"""Defaults by the names of flags: that on a GPU, and that on a CPU."""


def chosen_by_device(metavar: str, defaults: tuple[Any, Any]) -> object:
    """How the help shows a flag whose default is one of two."""
    gpu, cpu = (" ".join(map(str, each)) if isinstance(each, tuple) else each for each in defaults)
    return unset(metavar, f"{gpu} on a GPU, {cpu} on a CPU")


@dataclass(frozen=True, kw_only=True)
class StudyArguments:
    """Flags that every study has."""

    device: DeviceFlag = "auto"
    seed: int = 0
    """Seed of the inputs."""
    name: Annotated[str | None, unset("NAME", "precisions and device")] = None
    """Name of the directory."""
    output: Path = Path("data")
    """Directory for results."""
    json: Switch = False
    """Print JSON instead of tables."""

    def grid_of(self, kind: type[GridT], by_device: ByDevice) -> GridT:
        """The grid of the flags that are named as its fields; raise ValueError where they mean none."""
        device = resolve_device(self.device)
        values = {each.name: getattr(self, each.name) for each in fields(kind)}
        defaults = {name: gpu if device is Device.CUDA else cpu for name, (gpu, cpu) in by_device.items()}
        given = {name: value for name, value in values.items() if value is not None}
        return kind(**defaults | given | {"device": device})


def show_study(
    measure: Callable[["StatusLine"], StudyT],
    write: Callable[[StudyT, Path], object],
    tables: Callable[[StudyT], Iterable["Table"]],
    directory: Path | None,
    *,
    as_json: bool,
    warnings: Callable[[StudyT], Iterable[str]] = lambda _: (),
) -> StudyT:
    """Measure, saying how far that is; write the results into the directory, if one is given; print them.

    Returns the study.
    """
    from cs336_systems.report.status_line import StatusLine
    from cs336_systems.report.terminal import print_table, say

    with json_alone(as_json) as print_json:
        with StatusLine() as status:
            study = measure(status)
            if directory is not None:
                status("drawing and writing")
                write(study, directory)
        for warning in warnings(study):
            print(inert_line(f"warning: {warning}"), file=sys.stderr)
        if print_json is not None:
            print_json(encode_json(study))
        else:
            for table in tables(study):
                print_table(table, directory)
        if directory is not None:
            say(f"results: {directory}")
    return study
