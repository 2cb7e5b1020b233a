"""Hand-made pages."""

from cs336.report.charts import Bar, Chart, Panel, Style
from cs336.report.columns import Column
from cs336.report.draw import svg_of
from cs336.report.page.blocks import (
    Bars,
    Chapter,
    Closed,
    Facts,
    Glance,
    Page,
    PictureBlock,
    Prose,
    TableBlock,
    Tile,
)
from cs336.report.section import make_table
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
            "time",
            "ms",
            about,
            key="step_mean_ms",
            instead="failure",
            scale=1000,
            write=lambda value: f"{value:.0f}",
        ),
        Column("steps", key="steps", write=str),
    ]
    rows = [
        {"size": size, "step_mean_ms": time, "failure": "out of memory", "steps": 10 * 3**number}
        for number, (size, time) in enumerate(names.items())
    ]
    return make_table(
        "Steps", columns, rows, [note] if note else [], lambda row: row["step_mean_ms"] is None
    )


def make_page(*blocks):
    return Page(title="A report", chapters=[Chapter(id="first", title="First", blocks=blocks)])


def make_chart(name="small"):
    bars = [Bar(name=name, parts={name: 1.0}, figures=[name]), Bar(name="xl", failure=name)]
    panel = Panel(label=name, bars=bars)
    styles = {name: Style(colour="#0072B2")}
    return Chart(
        name="bars",
        title=f"Bars of {name}",
        settings=name,
        panels=[panel],
        legend_columns=1,
        styles=styles,
    )


def table_page(note=""):
    """Findings, a table, a picture, and a text that is closed."""
    table = make_steps(note)
    return make_page(
        Prose(paragraphs=["Step of xl: 10 ms."]),
        TableBlock(id="steps", table=table),
        make_picture(),
        Closed(title="Closed", text="line 1\nline 2"),
    )


def make_picture(name="small", identifier="bars"):
    return PictureBlock(id=identifier, svg=svg_of(make_chart(name), identifier))


def page_with(text):
    """A page with the text in every place that shows one."""
    table = make_steps(text, text, {text: 0.1, "medium": None})
    headings = tuple(
        Column(text, text, text, key=own.key, numeric=own.numeric) for own in table.headings
    )
    table = type(table)(
        title=text, headings=headings, rows=((text, "1", text), table.rows[1]), notes=(text,)
    )
    bar = Bar(name=text, parts={text: 1.0}, figures=[text])
    bars = Bars(
        title=text,
        bars=[bar, Bar(name="xl", failure=text)],
        styles={text: Style(colour="#0072B2")},
        unit=text,
    )
    glance = Glance(
        answer=text, more=text, bars=[bars], tiles=[Tile(text, text, text)], doubts=[text]
    )
    blocks = [
        Prose(paragraphs=[text]),
        TableBlock(id="steps", table=table),
        make_picture(text),
        Facts(rows=[(text, text)]),
        Closed(title=text, text=text),
    ]
    return Page(
        title=text, glance=glance, chapters=[Chapter(id="first", title=text, blocks=blocks)]
    )
