"""Steps of different kinds in one file, such as prefill and decode: a row for each kind."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ....analysis.kernels.step_profile import StepLabel, StepProfile
from ...column import Column, Row
from ...columns import column
from ...section import Section, over_configurations, rows_of
from ...words import ratio, rounded
from .entry import Explained
from .sums import mean_std_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class StepKind:
    """The steps of one kind."""

    name: str
    steps: tuple[int, ...]
    """Their numbers, from 0."""
    labels: tuple[StepLabel, ...]

    def of(self, times_s: Sequence[float]) -> list[float]:
        """The times of these steps, of one time for each step of the profile."""
        return [times_s[step] for step in self.steps]

    def span_of(self, key: str) -> str:
        """The least and the largest batch, or number of tokens, as `32` or `16 to 32`; empty where
        no step has any.
        """
        values = [getattr(label, key) for label in self.labels]
        known = [value for value in values if value is not None]
        if not known:
            return ""
        least = min(known)
        largest = max(known)
        return f"{least:,}" if least == largest else f"{least:,} to {largest:,}"


def step_kinds(profile: StepProfile) -> list[StepKind]:
    """The kinds of steps, that of most steps first; none where all steps are alike."""
    by_name: dict[str, list[int]] = {}
    for step, label in enumerate(profile.step_labels):
        by_name.setdefault(label.kind or "of no known kind", []).append(step)
    kinds = []
    for name, steps in sorted(by_name.items(), key=lambda item: -len(item[1])):
        labels = tuple(profile.step_labels[step] for step in steps)
        kinds.append(StepKind(name=name, steps=tuple(steps), labels=labels))
    return kinds


def wall_by_step_s(profile: StepProfile) -> list[float]:
    """The time of each step on the device: that of its phases, added up."""
    walls_s = []
    for step in range(profile.num_steps):
        walls_s.append(sum(times.wall_s[step] for times in profile.phases))
    return walls_s


def kinds(entries: Sequence[Explained]) -> Section:
    """Number, time and load of the steps of each kind."""
    columns = [
        Column("kind", "", "What tells the steps apart.", key="kind", numeric=False, write=str),
        Column("steps", "", "How many there are.", key="steps", write=str),
        column("wall_mean_ms", std="wall_std_ms"),
        column("busy_share"),
        Column("kernels", "", "Kernels in a step.", key="kernels_per_step", write=rounded),
        Column("batch", "", "Requests, by the ranges' names.", key="batch", write=str),
        Column("tokens", "", "Tokens, by the ranges' names.", key="tokens", write=str),
    ]
    return over_configurations("step_kinds", "Steps by kind", rows_of(entries, _rows), columns)


def _rows(entry: Explained) -> Iterator[Row]:
    """A row for each kind of steps."""
    profile = entry.profile
    walls_s = wall_by_step_s(profile)
    for kind in step_kinds(profile):
        mean_ms, std_ms = mean_std_ms([kind.of(walls_s)])
        busy_s = sum(sum(kind.of(times.busy_s)) for times in profile.phases)
        launches = sum(sum(kind.of(times.launches)) for times in profile.phases)
        yield {
            "kind": kind.name,
            "steps": len(kind.steps),
            "wall_mean_ms": mean_ms,
            "wall_std_ms": std_ms,
            "busy_share": ratio(busy_s, sum(kind.of(walls_s))),
            "kernels_per_step": launches / len(kind.steps),
            "batch": kind.span_of("batch"),
            "tokens": kind.span_of("tokens"),
        }
