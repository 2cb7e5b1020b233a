"""What an answer to a question of the course is made of, and which results answer it best."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from cs336_systems.config import Device, RunConfig
from cs336_systems.record import RunRecord, Status
from cs336_systems.report.frame import apart_from, order, rows_of, to_frame
from cs336_systems.report.identity import ALWAYS, names_of, settings_of, shared_settings, usual_settings
from cs336_systems.report.page.collection import Collection
from cs336_systems.report.page.commands import command_for
from cs336_systems.report.page.refusals import separated
from cs336_systems.report.results import Results
from cs336_systems.report.table import Table

COURSE_SIZES = ("small", "medium", "large", "xl", "2.7B")
"""The sizes of the course's table, of both editions."""
CONTEXT = 512
"""The context of the course's questions unless they say another."""
FREE = ("size", "context_length", "mode", "precision", "device", "warmup_steps", "measured_steps", "seed", "repeat",
        "profiler")  # fmt: skip
"""Settings that a question chooses; all others have their usual values in the course."""

Place = tuple[Path, str]
"""A results directory, and the name of a table in its part of the page."""
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Sentences, the tables of other chapters that they rest on, and the part of the question that is not answered."""

    sentences: Sequence[str] = ()
    tables: Sequence[Table] = ()
    """Small tables that the question asks for."""
    places: Sequence[Place] = ()
    """The tables that the sentences rest on."""
    pictures: Sequence[tuple[str, Place]] = ()
    """Pictures that the question asks for: in words what each shows, and its place."""
    commands: Sequence[str] = ()
    """Command lines that measured the results."""
    conditions: str = ""
    """The settings and the device of the results."""
    lacking: str = ""
    """What else the course asks for, in a few words; empty if nothing is lacking."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Runs of one directory that can be compared with each other."""

    collection: Collection
    """All results, of which these are some."""
    directory: Path
    ending: str
    """Suffix that distinguishes the identifiers of their tables from those of other runs in the directory."""
    results: Results

    @property
    def device_name(self) -> str | None:
        """The device of all these runs, as far as it is known."""
        return next(filter(None, (record.device_name for record in self.results.records)), None)

    @property
    def finished(self) -> list[RunRecord]:
        """The runs without a profiler that ended well."""
        return [record for record in self.results.published if record.status is Status.OK]

    def place(self, name: str) -> Place:
        """The table of this name."""
        return self.directory, f"{name}{self.ending}"

    def answer(
        self, sentences: Iterable[str], *, tables: Sequence[Table] = (), place: str = "results", lacking: str = ""
    ) -> Answer:
        """An answer that rests on the table `place` of these runs."""
        return Answer(
            sentences=list(sentences),
            tables=tables,
            places=[self.place(place)],
            commands=[command_for(self.collection, self.directory)],
            conditions=self.conditions,
            lacking=lacking,
        )

    def only(self, records: Sequence[RunRecord]) -> "Runs":
        """These runs alone, with their profiles and those of the same runs under a profiler."""
        kept, configs = {id(record) for record in records}, {record.config for record in records}
        results = replace(
            self.results,
            records=records,
            kernels=[entry for entry in self.results.kernels if kept & {id(entry.profiled), id(entry.plain)}],
            memory=[entry for entry in self.results.memory if entry.config in configs],
        )
        return replace(self, results=results)

    @property
    def rows(self) -> list[Row]:
        """A row of values for each configuration without a profiler."""
        return rows_of(to_frame(self.results.published))

    @property
    def conditions(self) -> str:
        """The settings that all runs share, and their device."""
        records = self.results.published or self.results.records
        named = [(record.config, record.device_name) for record in records]
        return shared_settings(named, ("size", "context_length"))


def runs_of(collection: Collection) -> Iterator[Runs]:
    """The runs of each directory, in groups that can be compared."""
    for directory, results in collection.sweeps.items():
        groups = separated(results).groups
        for number, group in enumerate(groups, 1):
            ending = f"-{number}" if len(groups) > 1 else ""
            yield Runs(collection=collection, directory=directory, ending=ending, results=group)


@dataclass(frozen=True, kw_only=True)
class Material:
    """All results that answers are made from."""

    collection: Collection
    runs: Sequence[Runs]
    """Runs of sweeps; see `runs_of`."""

    @classmethod
    def of(cls, collection: Collection) -> "Material":
        """What the collection holds."""
        return cls(collection=collection, runs=tuple(runs_of(collection)))

    @cached_property
    def gpus(self) -> list[str]:
        """The GPUs of the sweeps' runs, the one with the most runs first."""
        found: Counter[str] = Counter()
        for own in self.runs:
            num_on_gpu = sum(record.config.device is Device.CUDA for record in own.results.records)
            if own.device_name is not None and num_on_gpu:
                found[own.device_name] += num_on_gpu
        return [name for name, _ in found.most_common()]


def best(
    material: Material,
    suiting: Callable[[Runs], Sequence[RunRecord]],
    wanted: Callable[[RunConfig], bool] | None = None,
) -> Runs | None:
    """The runs that answer a question best, without runs that the question is not about; None if there are none.

    `suiting` has the records that the question is about. The directory with the most `wanted` configurations is chosen;
    of several, one measured on a GPU, then on the GPU of most results, so that answers beside each other are of one
    GPU, then the one with the most runs, then the newest.
    """
    wanted = wanted or is_of_course
    found = [(own, records) for own in material.runs if (records := suiting(own))]
    if not found:
        return None

    def rank(pair: tuple[Runs, Sequence[RunRecord]]) -> tuple[int, bool, bool, int, str]:
        configs = {record.config.configuration for record in pair[1]}
        on_gpu = any(config.device is Device.CUDA for config in configs)
        is_usual = pair[0].device_name in material.gpus[:1]
        newest = max(record.started_at for record in pair[1])
        return sum(map(wanted, configs)), on_gpu, is_usual, len(configs), newest

    chosen, records = max(found, key=rank)
    kept = [record for record in records if wanted(record.config)] or records
    return chosen.only(sorted(kept, key=lambda record: order(record.config)))


def from_best(
    suiting: Callable[[Runs], Sequence[RunRecord]], wanted: Callable[[RunConfig], bool] | None = None
) -> Callable[[Callable[[Runs], Answer]], Callable[[Material], Answer | None]]:
    """Decorator: a function that answers from runs becomes one that answers from the `best` runs of all results.

    The result answers None if there are no such runs.
    """

    def decorated(answer: Callable[[Runs], Answer]) -> Callable[[Material], Answer | None]:
        def from_material(material: Material) -> Answer | None:
            return None if (runs := best(material, suiting, wanted)) is None else answer(runs)

        return from_material

    return decorated


def is_of_course(config: RunConfig) -> bool:
    """Whether the run is of one of the course's models, in plain form, with a batch of 4, as in the questions."""
    return config.size in COURSE_SIZES and is_plain(config)


def is_plain(config: RunConfig, *but: str) -> bool:
    """Whether all settings but these, the size, the context and what a question chooses have their usual values."""
    usual = usual_settings(config)
    return all(value == usual[name] or name in (*FREE, *but) for name, value in settings_of(config).items())


def with_several(records: Sequence[RunRecord], setting: str) -> list[RunRecord]:
    """The runs that differ from another one in nothing but this setting."""
    groups: dict[object, list[RunRecord]] = {}
    for record in records:
        groups.setdefault(apart_from(record.config, setting), []).append(record)
    return [
        record
        for own in groups.values()
        if len({apart_from(each.config) for each in own}) > 1
        for record in own
    ]  # fmt: skip


def pairs(rows: Sequence[Row], setting: str, first: object) -> list[tuple[Row, Row]]:
    """Each row, with the row that differs from it only by the `first` value of this setting."""

    def others(row: Row) -> tuple[tuple[str, object], ...]:
        return tuple((name, value) for name, value in row["identity"].items() if name not in (setting, "digest"))

    known = {others(row): row for row in rows if row[setting] == first}
    return [(row, known[others(row)]) for row in rows if row[setting] != first and others(row) in known]


def ratios(found: Sequence[tuple[Row, Row]], key: str, always: Sequence[str] = ALWAYS) -> dict[str, float]:
    """The value of the first row of each pair over that of the second, where both have one, by the first's name."""
    names = names_of([row["identity"] for row, _ in found], always=always)
    known = {name: (row[key], other[key]) for name, (row, other) in zip(names, found, strict=True)}
    return {name: value / other for name, (value, other) in known.items() if value and other}


def at_one_context(runs: Runs) -> Runs:
    """The runs at CONTEXT, or else those at the longest context that most of them have."""
    records = list(runs.results.records)
    contexts = [record.config.model.context_length for record in records]
    chosen = CONTEXT if CONTEXT in contexts else max(contexts, key=lambda length: (contexts.count(length), length))
    return runs.only([record for record in records if record.config.model.context_length == chosen])


def lacking_sizes(runs: Runs) -> str:
    """Which of the course's sizes were not measured on a GPU, in words; empty if all were."""
    there = {record.config.size for record in runs.results.records if record.config.device is Device.CUDA}
    missing = [size for size in COURSE_SIZES if size not in there]
    return f"size{'s' if len(missing) > 1 else ''} {', '.join(missing)}" if missing else ""


def plain_runs(runs: Runs) -> list[RunRecord]:
    """The finished runs without a profiler of this project's plain step."""
    return [record for record in runs.finished if is_plain(record.config)]
