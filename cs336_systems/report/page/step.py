"""One step kernel by kernel, as data for a picture that is zoomed from the whole step to one kernel."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """Kernels of one stream in the order in which they start; times in nanoseconds from the start of the step."""

    label: str
    start_ns: Sequence[int]
    end_ns: Sequence[int]
    kind: Sequence[str]
    """Class of each kernel, a key of `StepPicture.colours`."""
    name: Sequence[str]

    def __post_init__(self) -> None:
        lengths = {len(values) for values in (self.start_ns, self.end_ns, self.kind, self.name)}
        if len(lengths) > 1:
            raise ValueError(f"{self.label}: start, end, class and name need as many entries as kernels, got {lengths}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A phase of the host or of the device, or a time without kernels, in nanoseconds from the start of the step."""

    start_ns: int
    end_ns: int
    name: str
    about: str = ""
    """More of it, for those who point at it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPicture:
    """Kernels in lanes, the phases above, and the idle times between."""

    length_ns: int
    lanes: Sequence[Lane]
    colours: Mapping[str, str]
    """Colour of each class of kernels, in the order of the legend."""
    phases: Mapping[str, Sequence[Span]]
    """Phases by what runs them, such as `host`."""
    idle: Sequence[Span] = ()

    @property
    def spec(self) -> dict[str, Any]:
        """What `Figure.spec` needs; each name and class stands in it once."""
        names = {name: number for number, name in enumerate(dict.fromkeys(n for lane in self.lanes for n in lane.name))}
        kinds = {kind: number for number, kind in enumerate(self.colours)}
        lanes = [
            {
                "label": lane.label,
                "start": list(lane.start_ns),
                "end": list(lane.end_ns),
                "kind": [kinds[kind] for kind in lane.kind],
                "name": [names[name] for name in lane.name],
            }
            for lane in self.lanes
        ]
        rows = {**self.phases, **({"idle": self.idle} if self.idle else {})}
        return {
            "kernels": True,
            "length_ns": self.length_ns,
            "names": list(names),
            "classes": list(kinds),
            "colours": list(self.colours.values()),
            "lanes": lanes,
            "rows": [{"label": label, "spans": [asdict(span) for span in spans]} for label, spans in rows.items()],
        }
