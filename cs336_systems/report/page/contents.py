"""What the page of a sweep holds: what stands out, the time, the kernels and the memory of a step, and every run."""

import base64
import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from cs336_systems.config import Phase, Profiler
from cs336_systems.files import encode_json
from cs336_systems.record import RunRecord, encode_record
from cs336_systems.report.frame import order, to_frame
from cs336_systems.report.page import figures
from cs336_systems.report.page.write import Block, Chapter, Figure, Page, Run, TableBlock
from cs336_systems.report.plots.steps import pictures
from cs336_systems.report.results import Results
from cs336_systems.report.section import Section
from cs336_systems.report.sections.kernels.files import SUBJECTS
from cs336_systems.report.sections.memory.files import sections as memory_sections
from cs336_systems.report.sections.steps import results_section
from cs336_systems.report.words import status_text
from cs336_systems.studies.ceilings_files import NO_CEILINGS, Ceilings
from cs336_systems.sweep.store import VIEWERS, raw_profile_path
from cs336_systems.text import inert_json, inert_line, shortened

LONGEST_TEXT = 20_000
"""Characters of a traceback or of the end of a log."""


def sweep_page(results: Results, directory: Path, ceilings: Ceilings = NO_CEILINGS) -> Page:
    """The page of what was measured into the directory; the PNGs are those in its plots/."""
    chapters = (
        _time(results.published, directory, ceilings),
        _kernels(results, directory),
        _memory(results, directory),
        _runs(results.records, directory),
    )
    return Page(
        title=inert_line(f"Time and memory of a training step: {directory.name}"),
        source=provenance(results.records, directory),
        chapters=[chapter for chapter in chapters if chapter.blocks],
    )


def provenance(records: Iterable[RunRecord], directory: Path) -> str:
    """Where what is shown comes from: directory, device, software, commit and time of measurement."""
    found = list(records)
    environments = [record.environment for record in found if record.environment is not None]
    commits = [
        f"{environment.git_commit[:9]}{' with changes' if environment.git_dirty else ''}"
        for environment in environments
        if environment.git_commit
    ]
    times = sorted(record.started_at for record in found)
    parts = [
        str(directory),
        *_each("", [environment.identity.device_name for environment in environments]),
        *_each("driver ", [environment.identity.driver for environment in environments]),
        *_each("PyTorch ", [environment.identity.torch for environment in environments]),
        *_each("commit ", commits),
        *([f"measured {' to '.join(dict.fromkeys((times[0][:19], times[-1][:19])))} UTC"] if times else []),
    ]
    return inert_line("; ".join(parts))


def _each(words: str, values: Iterable[str | None]) -> list[str]:
    """The different values, after what they are."""
    known = list(dict.fromkeys(value for value in values if value))
    return [f"{words}{', '.join(known)}"] if known else []


def _time(records: Sequence[RunRecord], directory: Path, ceilings: Ceilings) -> Chapter:
    """The time of a step: tables, and the pictures that the results support."""
    source = provenance(records, directory)
    blocks: list[Block] = []
    if records:
        blocks += _tables([results_section(records, ceilings)], source)
        for stem, draw in pictures(to_frame(records, ceilings)):
            title, settings, spec, height = figures.picture(draw)
            blocks.append(_figure(stem, f"{title}: {settings}", spec, directory, source, height))
    return Chapter(id="time", title="Time of a step", blocks=blocks, source=source)


def _kernels(results: Results, directory: Path) -> Chapter:
    """What the kernels of the profiled runs did."""
    source = provenance([entry.profiled for entry in results.kernels], directory)
    blocks = _tables([make(results.kernels) for make in SUBJECTS], source) if results.kernels else []
    return Chapter(id="kernels", title="Kernels", blocks=blocks, source=source)


def _memory(results: Results, directory: Path) -> Chapter:
    """What the memory of the recorded runs held."""
    configs = {entry.config for entry in results.memory}
    source = provenance([record for record in results.records if record.config in configs], directory)
    entries = sorted(results.memory, key=lambda entry: order(entry.config))
    blocks = _tables(memory_sections(entries), source) if entries else []
    return Chapter(id="memory", title="Memory", blocks=blocks, source=source)


def _tables(sections: Iterable[Section], source: str) -> list[TableBlock]:
    """The tables of the sections; the first of a section is copied as CSV with all values of the subject."""
    return [
        TableBlock(id=f"{section.name}{number or ''}", table=table, csv="" if number else section.csv, source=source)
        for section in sections
        for number, table in enumerate(section.tables)
    ]


def _figure(stem: str, title: str, spec: figures.Spec, directory: Path, source: str, height: int) -> Figure:
    """The picture; the PNG of this name stands in its place where there is no plotly."""
    png = directory / "plots" / f"{stem}.png"
    has_png = importlib.util.find_spec("plotly") is None and png.is_file()
    address = f"data:image/png;base64,{base64.b64encode(png.read_bytes()).decode()}" if has_png else ""
    return Figure(id=f"figure-{stem}", title=inert_line(title), spec=spec, png=address, source=source, height=height)


def _runs(records: Iterable[RunRecord], directory: Path) -> Chapter:
    """Every run, failed ones too."""
    found = sorted(records, key=lambda record: (*order(record.config), record.config.profiler, record.config.repeat))
    blocks = [_run(record, directory) for record in found]
    return Chapter(id="runs", title="Runs", blocks=blocks, source=provenance(found, directory))


def _run(record: RunRecord, directory: Path) -> Run:
    """All that is kept of one run, in words and as its record."""
    step = record.measurement(Phase.STEP)
    profiler = "" if record.config.profiler is Profiler.NONE else f", under {record.config.profiler}"
    mean = "" if step is None else f", {step.mean_s * 1e3:.2f} ms"
    title = f"{record.config.label}{profiler}: {status_text(record.status)}{mean}"
    texts = [(heading, text) for heading, text in _run_texts(record, directory) if text]
    return Run(id=f"run-{record.key}", title=inert_line(title), texts=texts)


def _run_texts(record: RunRecord, directory: Path) -> Iterator[tuple[str, str]]:
    yield "Warnings", _lines(f"{warning.code}: {warning.message}" for warning in record.warnings)
    failure = record.failure
    if failure is not None:
        where = f" (in {failure.where})" if failure.where else ""
        yield "Failure", inert_line(f"{failure.message}{where}")
        yield "Traceback", _long(failure.traceback)
        yield "End of the log", _long(failure.log_tail)
    yield "Warm-up steps in order (ms)", _times(record.warmup_times_s)
    for measurement in record.measurements:
        yield f"Measured in order: {measurement.phase} (ms)", _times(measurement.times_s)
    yield "Host, to launch each step (ms)", _times(record.host_times_s)
    yield "Memory", _json(record.memory)
    yield "State of the GPU", _json(record.telemetry)
    yield "Environment", _json(record.environment)
    if record.config.profiler is not Profiler.NONE:
        path = raw_profile_path(record.config, directory / "runs")
        yield "Raw profile", inert_line(f"{path}: open it with {VIEWERS[record.config.profiler]}")
    yield "Record", inert_json(encode_record(record)).decode()


def _lines(texts: Iterable[str]) -> str:
    return "\n".join(inert_line(text) for text in texts)


def _long(text: str | None) -> str:
    """A text of several lines, of which a long one loses its middle."""
    return "" if text is None else _lines(shortened(text, LONGEST_TEXT).splitlines())


def _times(times_s: Sequence[float]) -> str:
    return ", ".join(f"{time_s * 1e3:.4f}" for time_s in times_s)


def _json(value: object) -> str:
    return "" if value is None else inert_json(encode_json(value)).decode()
