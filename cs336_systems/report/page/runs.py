"""The runs of a page: of each, failed ones too, all that is kept of it in words and as its record."""

from collections.abc import Iterable, Iterator, Sequence

from markupsafe import Markup

from cs336_systems.config import Phase, Profiler
from cs336_systems.record import RunRecord, Status, encode_record
from cs336_systems.report.frame import order
from cs336_systems.report.numbers import significant
from cs336_systems.report.page.commands import command_of
from cs336_systems.report.page.figures import Spec
from cs336_systems.report.page.provenance import PlaceOf, provenance
from cs336_systems.report.page.run_facts import facts_of
from cs336_systems.report.page.write import Chapter, Figure, Run
from cs336_systems.report.plots import palette
from cs336_systems.report.words import status_text
from cs336_systems.text import inert_json, inert_line, shortened

LONGEST_TEXT = 20_000
"""Characters of a traceback or of the end of a log."""
STEP, OTHER = "#333333", "#888888"
"""Colours of the whole step, and of what is beside the measured steps."""
HOST = "host, to launch a step"
MOST_ABOVE, ROOM_ABOVE = 2, 1.3
"""A first step that takes more than this many times the longest other is above the figure, whose room is this."""


def runs_chapter(records: Iterable[RunRecord], place_of: PlaceOf, prefix: str = "") -> Chapter:
    """Every run, failed ones too; `prefix` begins all identifiers."""
    found = sorted(records, key=lambda record: (*order(record.config), record.config.profiler, record.config.repeat))
    blocks = [_run(record, place_of, f"{prefix}run-{number}") for number, record in enumerate(found)]
    return Chapter(id=f"{prefix}runs", title="Runs", blocks=blocks, source=provenance(found, place_of))


def _run(record: RunRecord, place_of: PlaceOf, identifier: str) -> Run:
    """All that is kept of one run: facts, its times in order, and its texts."""
    step = record.measurement(Phase.STEP)
    profiler = "" if record.config.profiler is Profiler.NONE else f", under {record.config.profiler}"
    mean = "" if step is None else f", {step.mean_s * 1e3:.2f} ms"
    spec = times_picture(record)
    source = provenance([record], place_of)
    title = f"Every step of the run in order: {record.config.label}{profiler}"
    figure = Figure(id=f"{identifier}-times", title=inert_line(title), spec=spec or {}, source=source, height=300)
    return Run(
        id=identifier,
        title=inert_line(f"{record.config.label}{profiler}: {status_text(record.status)}{mean}"),
        facts=facts_of(record, place_of(record)),
        blocks=[figure] if spec else [],
        texts=[(heading, text) for heading, text in _texts(record) if text],
        failed=record.status is not Status.OK,
    )


def _texts(record: RunRecord) -> Iterator[tuple[str, str]]:
    """Headings and texts; an empty text is not known."""
    failure = record.failure
    yield "Repeat it with", inert_line(command_of(record.config))
    if failure is not None:
        yield "Traceback", _long(failure.traceback)
        yield "End of the log", _long(failure.log_tail)
    yield "Times in order (ms)", _lines(f"{name}: {_times(times_s)}" for name, times_s in _series(record) if times_s)
    yield "Record", inert_json(encode_record(record)).decode()


def _series(record: RunRecord) -> list[tuple[str, Sequence[float]]]:
    """The times of all steps in order: of warm-up, of the measured ones and of their phases, and of launching."""
    measured = sorted(record.measurements, key=lambda own: own.phase is not Phase.STEP)
    return [
        ("warm-up", record.warmup_times_s),
        *((str(own.phase), own.times_s) for own in measured),
        (HOST, record.launch_times_s),
    ]


def _measured_s(record: RunRecord) -> Sequence[float]:
    step = record.measurement(Phase.STEP)
    return step.times_s if step else ()


def times_picture(record: RunRecord) -> Spec | None:
    """A line for each series over the steps of the run, of which those of warm-up are grey; None without times."""
    num_warmup = len(record.warmup_times_s)
    colours = {str(phase): colour for phase, colour in palette.PHASE_COLOURS.items()} | {str(Phase.STEP): STEP}
    data: list[Spec] = []
    for name, times_s in _series(record):
        first = 1 if name == "warm-up" else num_warmup + 1
        if times_s:
            colour = colours.get(name, OTHER)
            data.append(
                {
                    "type": "scatter", "mode": "lines" if name == HOST else "lines+markers", "name": name,
                    "x": list(range(first, first + len(times_s))), "y": [time_s * 1e3 for time_s in times_s],
                    "line": {"color": colour, "width": 1.5, "dash": "dot" if colour == OTHER else "solid"},
                    "marker": {"color": colour, "size": 6, "symbol": "circle-open" if name == "warm-up" else "circle"},
                    "hovertemplate": Markup("{}: %{{y:.5~g}} ms").format(name),
                }
            )  # fmt: skip
    shade = {"type": "rect", "yref": "paper", "y0": 0, "y1": 1, "x0": 0.5, "x1": num_warmup + 0.5, "layer": "below",
             "line": {"width": 0}, "fillcolor": OTHER, "opacity": 0.15}  # fmt: skip
    layout: Spec = {
        "hovermode": "x unified", "shapes": [shade] if num_warmup else [],
        "xaxis": {"title": {"text": "step of the run, with warm-up"}},
        "yaxis": {"title": {"text": "time (ms)"}, "rangemode": "tozero"},
    }  # fmt: skip
    first_s, others_s = record.warmup_times_s[:1], [*record.warmup_times_s[1:], *_measured_s(record)]
    if first_s and others_s and first_s[0] > MOST_ABOVE * max(others_s):
        top_ms = 1e3 * ROOM_ABOVE * max(others_s)
        layout["yaxis"] |= {"range": [0, top_ms]}
        layout["annotations"] = [{"x": 1, "y": top_ms, "showarrow": False, "xanchor": "left", "yanchor": "top",
                                  "text": f"step 1: {significant(first_s[0] * 1e3)} ms"}]  # fmt: skip
    return {"data": data, "layout": layout} if data else None


def _lines(texts: Iterable[str]) -> str:
    return "\n".join(map(inert_line, texts))


def _long(text: str | None) -> str:
    """A text of several lines, of which a long one loses its middle."""
    return "" if text is None else _lines(shortened(text, LONGEST_TEXT).splitlines())


def _times(times_s: Sequence[float]) -> str:
    return ", ".join(f"{time_s * 1e3:.4f}" for time_s in times_s)
