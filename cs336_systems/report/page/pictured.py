"""The pictured step of an explained profile as a picture that can be zoomed to one kernel."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any, TypeVar

from cs336_systems.analysis.kernels.classes import KernelClass
from cs336_systems.analysis.kernels.step_profile import IdleSpans, PicturedStep, StepProfile, Work
from cs336_systems.report.page.figures import Spec
from cs336_systems.report.page.write import Integers
from cs336_systems.report.plots import palette
from cs336_systems.report.sections.kernels.plots import gap_words

IDLE = "idle"
"""Class of the times in which a device had no kernel."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    """A name that kernels have."""

    short: str
    kind: str
    """Class, a key of `StepPicture.colours` or IDLE."""
    whole: str = ""
    """The profiler's name, if it differs from the short one."""


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
        """The lane's columns, with times as differences from the times before them, which take fewer bytes.

        A launch that is not known gets the time of the launch before it.
        """
        launches_us = [0]
        for launch in self.launch_ns:
            launches_us.append(launches_us[-1] if launch is None else launch // 1000)
        return {
            "label": self.label,
            "gap": Integers(start - end for start, end in zip(self.start_ns, (0, *self.end_ns), strict=False)),
            "length": Integers(end - start for start, end in zip(self.start_ns, self.end_ns, strict=True)),
            "name": Integers(self.name),
            "place": Integers(self.place),
            "launch_us": Integers(after - before for before, after in pairwise(launches_us)),
            "unknown": Integers(number for number, launch in enumerate(self.launch_ns) if launch is None),
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
        """The specification for `Figure.spec`; each text occurs in it once."""
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


def step_title(profile: StepProfile) -> str:
    """What `step_picture` shows."""
    step = profile.pictured
    is_merged = step is not None and step.pieces
    return "One step, close kernels of one class as one" if is_merged else "One step, kernel by kernel"


def step_picture(profile: StepProfile) -> Spec | None:
    """One step: the phases on the host and the device, each stream kernel by kernel, and the idle times; or None.

    Profiles of format version 1 and those of very many kernels have merged kernels.
    """
    step = profile.pictured
    if step is None or not step.wall_s:
        return None
    is_gpu = profile.work is Work.KERNELS
    phases = {"host": [_span(own.host_start_s, own.host_end_s, own.phase) for own in step.windows]}
    if is_gpu:
        phases["GPU"] = [_span(own.device_start_s, own.device_end_s, own.phase) for own in step.windows]
    names, places = _Numbers[Name](), _Numbers[str]()
    lanes = [*_kernel_lanes(profile, step, names, places), *_merged_lanes(step, names)]
    kinds = {name.kind for name in names}
    idle = list(_idle_lanes(profile, step, names, places)) if is_gpu else []
    return StepPicture(
        length_ns=_ns(step.wall_s),
        lanes=[*idle, *lanes],
        names=list(names),
        places=list(places),
        colours={kind: colour for kind, colour in palette.CLASS_COLOURS.items() if kind in kinds},
        phases=phases,
    ).spec


class _Numbers(dict[T, int]):
    """The number of each value, in the order in which they were first asked for."""

    def __missing__(self, value: T) -> int:
        self[value] = len(self)
        return self[value]


def _kernel_lanes(
    profile: StepProfile, step: PicturedStep, names: _Numbers[Name], places: _Numbers[str]
) -> Iterator[Lane]:
    """The kernels of each stream, with the copies and fills by the driver on it."""
    is_gpu = profile.work is Work.KERNELS
    rows: dict[tuple[int, int], list[tuple[int, int, int, int, int | None]]] = defaultdict(list)
    for stream in step.streams:
        kernels = {
            number: names[
                Name(short=own.short_name, kind=own.kind, whole="" if own.short_name == own.name else own.name)
            ]
            for number in dict.fromkeys(stream.kernel)
            for own in [profile.kernels[number]]
        }
        modules = {
            number: places[", ".join([own.phase, *([" > ".join(own.path)] if own.path else [])])]
            for number in dict.fromkeys(stream.module)
            for own in [profile.modules[number]]
        }
        columns = (stream.start_ns, stream.duration_ns, stream.launch_ns, stream.kernel, stream.module)
        rows[stream.device, stream.stream] += [
            (start, start + length, kernels[kernel], modules[module], launch)
            for start, length, launch, kernel, module in zip(*columns, strict=True)
        ]
    for copies in step.copies:
        name, place = names[Name(short=copies.name, kind=KernelClass.COPY_AND_FILL)], places[copies.phase]
        times = zip(copies.start_ns, copies.duration_ns, strict=True)
        rows[copies.device, copies.stream] += [(start, start + length, name, place, None) for start, length in times]
    several = len({device for device, _ in rows}) > 1
    for (device, number), own_rows in sorted(rows.items()):
        start_ns, end_ns, name_of, place_of, launch_ns = zip(*sorted(own_rows, key=itemgetter(0)), strict=True)
        on = f"GPU {device}, " if several else ""
        yield Lane(
            label=f"{on}stream {number}" if is_gpu else f"thread {number}",
            start_ns=start_ns,
            end_ns=end_ns,
            name=name_of,
            place=place_of,
            launch_ns=launch_ns if is_gpu else (),
        )


def _merged_lanes(step: PicturedStep, names: _Numbers[Name]) -> Iterator[Lane]:
    ordered = sorted(step.pieces, key=lambda piece: (piece.stream, piece.start_s))
    for stream, group in groupby(ordered, key=lambda piece: piece.stream):
        own = list(group)
        yield Lane(
            label=f"stream {stream}",
            start_ns=[_ns(piece.start_s) for piece in own],
            end_ns=[_ns(piece.end_s) for piece in own],
            name=[names[Name(short=f"{piece.kind} in {piece.phase}", kind=piece.kind)] for piece in own],
        )


def _idle_lanes(
    profile: StepProfile, step: PicturedStep, names: _Numbers[Name], places: _Numbers[str]
) -> Iterator[Lane]:
    """The idle times of each device; those of profiles without them are the longest over all steps."""
    longest = {_ns(gap.start_s): gap for gap in profile.gaps if gap.step == step.step}
    idle = step.idle or [
        IdleSpans(device=0, cause=gap.cause, start_ns=(start_ns,), duration_ns=(_ns(gap.duration_s),))
        for start_ns, gap in longest.items()
    ]
    devices = sorted({spans.device for spans in idle})
    for device in devices:
        following = {
            start: f"before {profile.kernels[kernel].short_name}"
            for stream in step.streams
            if stream.device == device
            for start, kernel in zip(stream.start_ns, stream.kernel, strict=True)
        }
        found = sorted(
            (start, start + length, spans.cause)
            for spans in idle
            if spans.device == device
            for start, length in zip(spans.start_ns, spans.duration_ns, strict=True)
        )
        yield Lane(
            label=IDLE if len(devices) == 1 else f"GPU {device} {IDLE}",
            start_ns=[start for start, _, _ in found],
            end_ns=[end for _, end, _ in found],
            name=[names[Name(short=cause, kind=IDLE)] for _, _, cause in found],
            place=[
                places[gap_words(longest[start]) if start in longest else following.get(end, "")]
                for start, end, _ in found
            ],
        )


def _ns(time_s: float) -> int:
    return round(time_s * 1e9)


def _span(start_s: float, end_s: float, name: str) -> Span:
    return Span(start_ns=_ns(start_s), end_ns=_ns(end_s), name=name)
