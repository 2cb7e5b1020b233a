"""Two sweeps side by side: which configuration of B belongs to which of A, and when the two must not be compared."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from cs336_systems.config import Profiler
from cs336_systems.record import RunRecord
from cs336_systems.text import LONGEST_PART, shortened

Settings: TypeAlias = Mapping[str, Hashable]


@dataclass(frozen=True, slots=True, kw_only=True)
class Matching:
    """Which rows of two sweeps belong together, by their indices."""

    pairs: tuple[tuple[int, int], ...]
    only_a: tuple[int, ...]
    only_b: tuple[int, ...]
    differing: tuple[str, ...]
    """Settings in which the sweeps differ as wholes; rows are matched by all others."""


def match(a: Sequence[Settings], b: Sequence[Settings]) -> Matching:
    """Match the rows of two sweeps by all settings except those in which the sweeps differ as wholes.

    All configurations of a sweep are different. The sweeps differ as wholes in a setting if they share no value of it.
    If a side would have a configuration twice without these settings, only those with a single value on each side are
    left out.
    """
    names = list(a[0] if a else ())
    values = {name: ({row[name] for row in a}, {row[name] for row in b}) for name in names}
    apart = [name for name, (of_a, of_b) in values.items() if of_a.isdisjoint(of_b)]
    single = [name for name in apart if all(len(own) == 1 for own in values[name])]
    for differing in (apart, single):
        by = [name for name in names if name not in differing]
        keys_a, keys_b = ([tuple(row[name] for name in by) for row in side] for side in (a, b))
        if len({*keys_a}) == len(a) and len({*keys_b}) == len(b):
            break
    place = {key: index for index, key in enumerate(keys_b)}
    return Matching(
        pairs=tuple((index, place[key]) for index, key in enumerate(keys_a) if key in place),
        only_a=tuple(index for index, key in enumerate(keys_a) if key not in place),
        only_b=tuple(index for index, key in enumerate(keys_b) if key not in {*keys_a}),
        differing=tuple(differing),
    )


def without_profiled(side: Sequence[RunRecord]) -> Sequence[RunRecord]:
    """The runs without a profiler, whose times count; all of them where there are no others."""
    return [record for record in side if record.config.profiler is Profiler.NONE] or side


def refuse_unlike(sides: Sequence[Sequence[RunRecord]], allow_mixed: bool) -> None:
    """Raise ValueError, in one line, for times under a profiler and, unless allowed, for unlike conditions."""
    for name, side in zip("AB", sides, strict=True):
        if any(record.config.profiler is not Profiler.NONE for record in side):
            raise ValueError(f"{name} has times under a profiler, which makes a run slower; compare runs without one")
    if allow_mixed:
        return
    if apart := conditions_apart(record for side in sides for record in side):
        raise ValueError(
            f"the records come from different hardware or software ({apart}); compare them with --allow-mixed"
        )
    if any(map(has_changed_inputs, sides)):
        raise ValueError(
            "the records of one side come from different versions of a model's source or of a token file; "
            "compare them with --allow-mixed"
        )


def conditions_apart(records: Iterable[RunRecord]) -> str:
    """In what the conditions of the records differ: `driver 580 and 590`; empty where they do not."""
    identities = {record.environment.identity for record in records if record.environment}
    found: dict[str, set[str]] = {}
    for identity in identities:
        for name, value in msgspec.to_builtins(identity).items():
            found.setdefault(name, set()).add(shortened(str(value), LONGEST_PART))
    words = (f"{name.replace('_', ' ')} {' and '.join(sorted(own))}" for name, own in found.items() if len(own) > 1)
    return ", ".join(words)


def has_changed_inputs(side: Sequence[RunRecord]) -> bool:
    """Whether records of one side come from different versions of a model's source or of a token file."""
    states = {(found.name, found.state) for record in side for found in record.inputs}
    of_configurations = {(record.config.configuration, record.inputs) for record in side}
    return any(len(found) > len({name for name, _ in found}) for found in (states, of_configurations))
