"""Where what a page shows comes from: directories, device, software, commit and time of measurement."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from cs336_systems.record import Environment, RunRecord
from cs336_systems.report.page.refusals import id_of
from cs336_systems.text import inert_line

PlaceOf = Callable[[RunRecord], Path]
"""The directory that a record comes from."""


def places(found_in: Mapping[Path, Sequence[RunRecord]], directory: Path) -> PlaceOf:
    """The place of each record: `found_in` has the records by directory, and all others are in `directory`."""
    known = {id_of(record): path for path, own in found_in.items() for record in own}

    def place_of(record: RunRecord) -> Path:
        return known.get(id_of(record), directory)

    return place_of


def provenance(records: Iterable[RunRecord], place_of: PlaceOf) -> str:
    """The directories of what is shown, or its file if it is one run, then device, software, commit and time."""
    found = list(records)
    places = dict.fromkeys(str(place_of(record)) for record in found)
    if len(found) == 1:
        places = dict.fromkeys([str(place_of(found[0]) / "runs" / f"{found[0].key}.json")])
    return inert_line("; ".join([", ".join(places), conditions_and_times(found)]))


def conditions_and_times(records: Sequence[RunRecord]) -> str:
    """Device, software and commit of the records, and when they were measured."""
    times = sorted(record.started_at for record in records)
    measured = " to ".join(dict.fromkeys(time[:19] for time in (*times[:1], *times[-1:])))
    return "; ".join([*conditions(records), *([f"measured {measured} UTC"] if times else [])])


def conditions(records: Sequence[RunRecord]) -> list[str]:
    """Device, software and commit of the records, each value once."""
    return conditions_of([record.environment for record in records if record.environment is not None])


def conditions_of(environments: Sequence[Environment]) -> list[str]:
    """Device, software and commit of these environments, each value once."""
    commits = [
        f"{environment.git_commit[:9]}{' with changes' if environment.git_dirty else ''}"
        for environment in environments
        if environment.git_commit
    ]
    return [
        *_each("", [environment.identity.device_name for environment in environments]),
        *_each("driver ", [environment.identity.driver for environment in environments]),
        *_each("PyTorch ", [environment.identity.torch for environment in environments]),
        *_each("measuring code ", [environment.identity.code[:9] for environment in environments]),
        *_each("commit ", commits),
    ]


def _each(words: str, values: Iterable[str | None]) -> list[str]:
    """The different values, after what they are."""
    known = list(dict.fromkeys(value for value in values if value))
    return [f"{words}{', '.join(known)}"] if known else []
