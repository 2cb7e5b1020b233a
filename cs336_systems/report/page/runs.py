"""The chapters about single runs: their table and failures, and how they were measured."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ...config import Profiler
from ...record import RUNS, Environment, RunRecord, published_runs
from ...studies.ceilings_files import NO_CEILINGS
from ...studies.records import PrecisionStudy
from ...sweep.store import VIEWERS, command_in, raw_profile_path
from ...text import shortened
from ..columns import Column, Row, column
from ..configurations import order
from ..quantities import MS, StepResult
from ..results import Results
from ..section import known, make_table
from ..sections.kernels.sums import about
from ..sections.memory.words import about as about_memory
from ..sections.shortage import shortage_table
from ..words import significant, status_text
from .blocks import Block, Closed, TableBlock
from .directory import Directory

MOST_TIMES = 40
"""Most raw times that the table of runs shows of one run; its record has all."""
LONGEST_TEXT = 20_000
"""Characters of a traceback or of the end of a log."""


def _first_times(times_ms: Sequence[float]) -> str:
    """The first MOST_TIMES of these times in milliseconds as text, and how many were left out."""
    shown = ", ".join(map(significant, times_ms[:MOST_TIMES]))
    left_out = len(times_ms) - MOST_TIMES
    return f"{shown} and {left_out} more" if left_out > 0 else shown


RUN = (
    Column("run", key="run", numeric=False, write=str),
    column("status"),
    column("step_mean_ms"),
    Column(
        "each step",
        "ms",
        "The raw times, in order.",
        key="times_ms",
        numeric=False,
        write=_first_times,
    ),
    Column("warnings", key="warnings", numeric=False, write=str),
    Column("record", key="record", numeric=False, write=str),
    Column("raw profile", about="If it was kept.", key="profile", numeric=False, write=str),
    Column("opens in", key="viewer", numeric=False, write=str),
)
"""Columns of the table of runs."""


def run_blocks(records: Sequence[RunRecord], directory: Path) -> Iterator[Block]:
    """A row for each run, failed ones too, then how they failed."""
    joined = published_runs(directory / RUNS)
    ordered = sorted(
        records,
        key=lambda record: (*order(record.subject), record.subject.profiler, record.subject.repeat),
    )
    rows = [_run(record) for record in ordered]
    for row, record in zip(rows, ordered, strict=True):
        if joined.is_file() and not (directory / row["record"]).is_file():
            row["record"] = f"{record.key} in {joined.name}"
    table = make_table("Runs", known(RUN, rows), rows, failed=lambda row: row["status"] != "ok")
    yield TableBlock(id="runs-table", table=table)
    for record in ordered:
        if record.seen is not None and record.seen.out_of_memory is not None:
            shortage = shortage_table(record.seen.out_of_memory)
            yield TableBlock(id=f"memory-{record.key}", table=shortage)
        failure = record.failure
        if failure is None:
            continue
        where = f" (in {failure.where})" if failure.where else ""
        traceback = shortened(failure.traceback or "", LONGEST_TEXT)
        texts = filter(None, (failure.message, traceback, failure.log_tail))
        yield Closed(
            title=f"{record.subject.label}: {status_text(record.status)}{where}",
            text="\n\n".join(texts),
        )


def _run(record: RunRecord) -> Row:
    """The row of one run in the page's table of all runs; None for a value that the run does not
    have.
    """
    subject = record.subject
    result = StepResult(subject, [record], NO_CEILINGS)
    row: Row = {key: result[key] for key in ("status", "step_mean_ms", "step_std_ms")}
    row |= {
        "run": subject.label,
        "times_ms": [time_s * MS for time_s in result.times_s] or None,
        "warnings": ", ".join(result.codes) or None,
        "record": f"{RUNS}/{record.key}.json",
        "profile": None,
        "viewer": None,
    }
    if subject.profiler is not Profiler.NONE:
        row["run"] += f", under {subject.profiler}"
        row["profile"] = str(raw_profile_path(subject, Path(RUNS)))
        row["viewer"] = VIEWERS[subject.profiler]
    return row


def source_facts(directory: Directory) -> Iterator[tuple[str, str]]:
    """Where the results come from: device, software, commit and time, and the command that made
    them.
    """
    results = directory.results
    if results is not None and results.is_of_file:
        yield from _of_file(results)
        return
    records: Sequence[RunRecord] = () if results is None else results.records
    environments = [record.environment for record in records]
    study = None if directory.study is None else directory.study.study
    if isinstance(study, PrecisionStudy):
        yield "device", study.gpu or "CPU"
        yield "PyTorch", study.torch
    elif study is not None:
        environments += [study.environment, *study.other_environments]
    yield from _conditions(environments)
    if times := sorted(record.started_at[:19] for record in records):
        yield "measured", f"{' to '.join(dict.fromkeys((times[0], times[-1])))} UTC"
    if command := command_in(directory.path):
        yield "command", command
    yield from _warnings(records)


def _warnings(records: Sequence[RunRecord]) -> Iterator[tuple[str, str]]:
    """What each warning means, in the words of the first run that has it."""
    first: dict[str, str] = {}
    for record in records:
        for warning in record.warnings:
            first.setdefault(
                f"warning {warning.code}", f"{warning.message} ({record.subject.label})"
            )
    yield from sorted(first.items())


def _of_file(results: Results) -> Iterator[tuple[str, str]]:
    """Facts on the explained file: its path and device, and for a trace what showed where steps
    begin.
    """
    for entry in results.memory:
        yield "file", about_memory(entry.profile)
    for explained in results.kernels:
        yield "file", about(explained.profile)
        if explained.profile.steps_from:
            yield "steps", f"shown by {explained.profile.steps_from}"


def _conditions(environments: Sequence[Environment | None]) -> Iterator[tuple[str, str]]:
    """Device, software and commit of the environments that are known, each value once."""
    known = [environment for environment in environments if environment is not None]
    identities = [environment.identity for environment in known]
    commits = []
    for environment in known:
        if environment.git_commit:
            changes = " with changes" if environment.git_dirty else ""
            commits.append(environment.git_commit[:9] + changes)
    parts: dict[str, Iterable[str | None]] = {
        "device": [identity.device_name for identity in identities],
        "driver": [identity.driver for identity in identities],
        "PyTorch": [identity.torch for identity in identities],
        "measuring code": [identity.code[:9] for identity in identities],
        "commit": commits,
    }
    for name, values in parts.items():
        if different := list(dict.fromkeys(filter(None, values))):
            yield name, ", ".join(different)
