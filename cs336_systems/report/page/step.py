"""One step kernel by kernel, as data for a picture that is zoomed from the whole step to one kernel."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

IDLE = "idle"
"""Class of the times in which a device had no kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    """A name that kernels have."""

    short: str
    kind: str
    """Class, a key of `StepPicture.colours` or IDLE."""
    whole: str = ""
    """The profiler's name, where the short one is not it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """Kernels of one stream, or idle times, in the order in which they start; a column has an entry for each.

    Times are nanoseconds from the start of the step.
    """

    label: str
    start_ns: Sequence[int]
    end_ns: Sequence[int]
    name: Sequence[int]
    """Index into `StepPicture.names`."""
    place: Sequence[int] = ()
    """Index into `StepPicture.places`; empty where the places are not known."""
    launch_ns: Sequence[int | None] = ()
    """When the host launched each kernel, None where it is not known; empty where it is known of none."""

    def __post_init__(self) -> None:
        columns = (self.start_ns, self.end_ns, self.name, self.place or self.name, self.launch_ns or self.name)
        if len(lengths := {len(column) for column in columns}) > 1:
            raise ValueError(f"{self.label}: all columns need as many entries as there are kernels, got {lengths}")

    @property
    def spec(self) -> dict[str, Any]:
        """Numbers as the differences from those before them, which take a third of the bytes."""
        launches_us = [0 if launch is None else launch // 1000 for launch in self.launch_ns]
        return {
            "label": self.label,
            "gap": [start - end for start, end in zip(self.start_ns, (0, *self.end_ns), strict=False)],
            "length": [end - start for start, end in zip(self.start_ns, self.end_ns, strict=True)],
            "name": list(self.name),
            "place": list(self.place),
            "launch_us": [after - before for before, after in pairwise((0, *launches_us))],
            "unknown": [number for number, launch in enumerate(self.launch_ns) if launch is None],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A phase of the host or of the device, in nanoseconds from the start of the step."""

    start_ns: int
    end_ns: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPicture:
    """Kernels and idle times in lanes, and the phases above."""

    length_ns: int
    lanes: Sequence[Lane]
    names: Sequence[Name]
    colours: Mapping[str, str]
    """Colour of each class of kernels, in the order of the legend."""
    phases: Mapping[str, Sequence[Span]]
    """Phases by what runs them, such as `host`."""
    places: Sequence[str] = ()
    """Phases and modules that kernels were launched in, or what there is to say about idle times."""

    @property
    def spec(self) -> dict[str, Any]:
        """What `Figure.spec` needs; each text stands in it once."""
        kinds = {kind: number for number, kind in enumerate((*self.colours, IDLE))}
        return {
            "kernels": True,
            "length_ns": self.length_ns,
            "names": [name.short for name in self.names],
            "whole": [name.whole for name in self.names],
            "kind": [kinds[name.kind] for name in self.names],
            "places": list(self.places),
            "classes": list(kinds),
            "colours": list(self.colours.values()),
            "lanes": [lane.spec for lane in self.lanes],
            "rows": [{"label": label, "spans": [asdict(s) for s in spans]} for label, spans in self.phases.items()],
        }
