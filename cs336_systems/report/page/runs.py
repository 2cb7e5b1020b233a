"""The runs of a page: of each, failed ones too, all that is kept of it in words and as its record."""

from collections.abc import Iterable, Iterator, Sequence

from cs336_systems.config import Phase, Profiler
from cs336_systems.files import encode_json
from cs336_systems.record import RunRecord, encode_record
from cs336_systems.report.frame import order
from cs336_systems.report.page.command import command_of
from cs336_systems.report.page.provenance import PlaceOf, provenance
from cs336_systems.report.page.write import Chapter, Run
from cs336_systems.report.words import status_text
from cs336_systems.sweep.store import VIEWERS, raw_profile_path
from cs336_systems.text import inert_json, inert_line, shortened

LONGEST_TEXT = 20_000
"""Characters of a traceback or of the end of a log."""


def runs_chapter(records: Iterable[RunRecord], place_of: PlaceOf, prefix: str = "") -> Chapter:
    """Every run, failed ones too; `prefix` begins all identifiers."""
    found = sorted(records, key=lambda record: (*order(record.config), record.config.profiler, record.config.repeat))
    blocks = [_run(record, place_of, f"{prefix}run-{number}") for number, record in enumerate(found)]
    return Chapter(id=f"{prefix}runs", title="Runs", blocks=blocks, source=provenance(found, place_of))


def _run(record: RunRecord, place_of: PlaceOf, identifier: str) -> Run:
    """All that is kept of one run, in words and as its record."""
    step = record.measurement(Phase.STEP)
    profiler = "" if record.config.profiler is Profiler.NONE else f", under {record.config.profiler}"
    mean = "" if step is None else f", {step.mean_s * 1e3:.2f} ms"
    title = f"{record.config.label}{profiler}: {status_text(record.status)}{mean}"
    texts = [(heading, text) for heading, text in _run_texts(record, place_of) if text]
    return Run(id=identifier, title=inert_line(title), texts=texts)


def _run_texts(record: RunRecord, place_of: PlaceOf) -> Iterator[tuple[str, str]]:
    """Headings and texts; an empty text is not known."""
    failure, profiler = record.failure, record.config.profiler
    yield "Repeat it with", inert_line(command_of(record.config))
    yield "Source", provenance([record], place_of)
    yield "Warnings", _lines(f"{warning.code}: {warning.message}" for warning in record.warnings)
    if failure is not None:
        yield "Failure", inert_line(f"{failure.message}{f' (in {failure.where})' if failure.where else ''}")
        yield "Traceback", _long(failure.traceback)
        yield "End of the log", _long(failure.log_tail)
    yield "Warm-up steps in order (ms)", _times(record.warmup_times_s)
    for measurement in record.measurements:
        yield f"Measured in order: {measurement.phase} (ms)", _times(measurement.times_s)
    yield "Host, to launch each step (ms)", _times(record.host_times_s)
    yield "Memory", _json(record.memory)
    yield "State of the GPU", _json(record.telemetry)
    yield "Environment", _json(record.environment)
    if profiler is not Profiler.NONE:
        path = raw_profile_path(record.config, place_of(record) / "runs")
        yield "Raw profile", inert_line(f"{path}: open it with {VIEWERS[profiler]}")
    yield "Record", inert_json(encode_record(record)).decode()


def _lines(texts: Iterable[str]) -> str:
    return "\n".join(map(inert_line, texts))


def _long(text: str | None) -> str:
    """A text of several lines, of which a long one loses its middle."""
    return "" if text is None else _lines(shortened(text, LONGEST_TEXT).splitlines())


def _times(times_s: Sequence[float]) -> str:
    return ", ".join(f"{time_s * 1e3:.4f}" for time_s in times_s)


def _json(value: object) -> str:
    return "" if value is None else inert_json(encode_json(value)).decode()
