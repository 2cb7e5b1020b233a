"""Hand-made pages."""

from markupsafe import Markup

from cs336_systems.report.columns import Column
from cs336_systems.report.formats import to_csv
from cs336_systems.report.page.pictured import IDLE, Lane, Name, Span, StepPicture
from cs336_systems.report.page.write import Chapter, Figure, Linked, Page, Prose, Run, TableBlock
from cs336_systems.report.table import make_table
from tests.report.making import HOSTILE

ATTACK = (
    '<img src=x onerror="window.hacked=1"></script><script>window.hacked=1</script>'
    "'><a href='javascript:hacked=1'>a</a>"
)
HOSTILE_TEXTS = (
    ATTACK,
    HOSTILE.replace("\n", ""),
    "\u202egnp.exe\ud800 \u2028.",
    "x" * 300,
    "</pre></td></table></style><style>*{display:none}",
)

TIMES = {"small": 0.0995, "medium": 0.1004, "large": None, "xl": 0.00991}
"""The first two look the same once rounded; large failed."""


def make_steps(note="", about="Time of one step.", names=TIMES):
    columns = [
        Column("size", key="size", numeric=False, write=str),
        Column(
            "time", "ms", about, key="step_mean_ms", instead="failure", scale=1000, write=lambda value: f"{value:.0f}"
        ),
        Column("steps", key="steps", write=str),
    ]
    rows = [
        {"size": size, "step_mean_ms": time, "failure": "out of memory", "steps": 10 * 3**number}
        for number, (size, time) in enumerate(names.items())
    ]
    return make_table("Steps", columns, rows, [note] if note else [], lambda row: row["step_mean_ms"] is None)


def csv_of(rows, keys=("device", "size", "step_mean_ms")):
    """A CSV file with a column that the table does not have, and without one that it has."""
    return to_csv(keys, ([{"device": "a, b", **row}[key] for key in keys] for row in rows))


def make_page(*blocks):
    return Page(title="A report", source="one device", chapters=[Chapter(id="first", title="First", blocks=blocks)])


def table_page(note=""):
    """Findings, a table and runs, without a figure."""
    table = make_steps(note)
    return make_page(
        Prose(paragraphs=[("Step of xl: 10 ms.", "steps.3.1"), ("There is a run.", "run-a")]),
        TableBlock(id="steps", table=table, csv=csv_of(table.values), source="from runs/"),
        Run(id="run-a", title="small", facts=[("device", "CPU")], texts=[("Record", '{\n "key": "a"\n}')]),
    )


def make_step(kernel="gemm", kind="matrix product", lane="stream 7", span="forward"):
    """Two thousand kernels of 1 us, 2 us apart, on one stream; on another one of 50 ns at 3.99 ms."""
    count = 2000
    start = [2000 * number for number in range(count)]
    names = [
        Name(short=kernel, kind=kind, whole=f"void {kernel}<float>"), Name(short=f"tiny {kernel}", kind="softmax"),
        Name(short="late launch", kind=IDLE),
    ]  # fmt: skip
    lanes = [
        Lane(label=IDLE, start_ns=[2_500_000], end_ns=[3_000_000], name=[2], place=[1]),
        Lane(
            label=lane, start_ns=start, end_ns=[at + 1000 for at in start], name=[0] * count, place=[0] * count,
            launch_ns=[at - 7_000 for at in start],
        ),
        Lane(label=f"{lane}, too", start_ns=[3_990_000], end_ns=[3_990_050], name=[1]),
    ]  # fmt: skip
    return StepPicture(
        length_ns=4_000_000, lanes=lanes, names=names, places=[f"forward, {span}", f"host in {span}"],
        colours={kind: "#0072B2", "softmax": "#D55E00"},
        phases={"host": [Span(start_ns=0, end_ns=1_000_000, name=span)]},
    )  # fmt: skip


def large_step(count):
    """So many kernels of eight names back to back on one stream, and idle times before every fifth."""
    names = [Name(short=f"kernel_{n}", kind=f"class {n % 4}") for n in range(8)] + [Name(short="late", kind=IDLE)]
    start = [20_000 * number for number in range(count)]
    lanes = [
        Lane(label=IDLE, start_ns=start[4::5], end_ns=[at + 9_000 for at in start[4::5]], name=[8] * (count // 5)),
        Lane(
            label="stream 7", start_ns=[at + 10_000 * (number % 5 == 4) for number, at in enumerate(start)],
            end_ns=[at + 20_000 for at in start], name=[number % 8 for number in range(count)], launch_ns=start,
        ),
    ]  # fmt: skip
    colours = {f"class {n}": colour for n, colour in enumerate(("#0072B2", "#D55E00", "#E69F00", "#009E73"))}
    spans = [Span(start_ns=at, end_ns=at + 5_000 * count, name="forward") for at in start[:: count // 4]]
    return StepPicture(
        length_ns=20_000 * count, lanes=lanes, names=names, colours=colours, phases={"host": spans, "GPU": spans}
    )


def figure_page():
    spec = {"data": [{"type": "bar", "x": ["a", "b"], "y": [1.0, 2.0], "name": "forward"}], "layout": {}}
    own = {"data": [{"type": "scatter", "y": [3.0, 1.0, 2.0]}], "layout": {}}
    return make_page(
        Figure(id="kernels", title="One step", spec=make_step().spec, height=320),
        Figure(id="bars", title="Bars", spec=spec),
        Run(id="run-a", title="small", blocks=[Figure(id="times", title="Times", spec=own, height=220)]),
    )


def page_with(text):
    """A page with the text in every place that shows one."""
    hover = Markup("{}<extra></extra>")
    spec = {
        "data": [
            {"type": "bar", "x": [text, "b"], "y": [1.0, 2.0], "name": text, "text": [text, text]},
            {"type": "scatter", "x": [text, "b"], "y": [2.0, 1.0], "hovertemplate": hover.format(text)},
        ],
        "layout": {
            "xaxis": {"title": {"text": text}, "type": "category"}, "annotations": [{"text": text, "x": 0, "y": 2}],
        },
    }  # fmt: skip
    table = make_steps(text, text, {text: 0.1, "medium": None})
    headings = tuple(Column(text, text, text, key=own.key, numeric=own.numeric) for own in table.headings)
    table = type(table)(title=text, headings=headings, rows=((text, "1", text), table.rows[1]), notes=(text,))
    chapter = Chapter(
        id="first", title=text, source=text,
        blocks=[
            Prose(paragraphs=[(text, "steps.0.0"), Linked(((text, "steps.0.1"), (text, "")))], heading=text,
                  more=[(text, "")]),
            TableBlock(id="steps", table=table, source=text),
            Figure(id="bars", title=text, spec=spec, source=text),
            Figure(id="kernels", title=text, spec=make_step(text, text, text, text).spec, source=text),
            Run(id="run-a", title=text, texts=[(text, text)], facts=[(text, text)]),
        ],
    )  # fmt: skip
    return Page(title=text, source=text, chapters=[chapter])
