"""Pictures of a comparison: the ratio of every configuration, or the processes of two."""

from collections.abc import Iterator, Sequence

from cs336_systems.analysis.compare import CONFIDENCE, Verdict
from cs336_systems.report.columns import WIDEST_RATIO, Row
from cs336_systems.report.plots.charts import Axis, Chart, Curve, Line, Panel, Point, Reference
from cs336_systems.report.plots.palette import GREY

LOOKS = {Verdict.FASTER: ("#0072B2", "o"), Verdict.SLOWER: ("#D55E00", "s"), Verdict.CANNOT_TELL: (GREY, "D")}
"""Colour and mark of each verdict."""
ROW_INCHES, LEAST_INCHES, MOST_INCHES = 0.42, 6.4, 30.0
BEYOND = 1.15
"""Factor by which the axis is longer than the ratios and their intervals."""
TICKS = [step * 10.0**power for power in range(-2, 4) for step in (1, 2, 5)]
WIDEST = 10.0
"""Factor around the ratios within which intervals are shown whole."""


def ratio_charts(rows: Sequence[Row], settings: str) -> list[Chart]:
    """B's step over A's with its interval, for each row that has one, by its `name`; none for fewer than two rows."""
    known = [row for row in rows if row["ratio"] is not None]
    if len(known) < 2:
        return []
    ratios = [row["ratio"] for row in known]
    ends = [end for row in known for end in (row["ratio_low"], row["ratio_high"]) if end is not None]
    low, high = min(ratios) / WIDEST, max(ratios) * WIDEST
    shown = [1.0, *ratios, *(min(max(end, low), high) for end in ends)]
    limits = min(shown) / BEYOND, max(shown) * BEYOND
    ticks = [tick for tick in TICKS if limits[0] <= tick <= limits[1]]
    y = Axis(label="step of B / step of A", unit="times A's step", is_log=True, limits=limits, ticks=ticks)
    panel = Panel(
        x=Axis(names=[row["name"] for row in known]), y=y, curves=list(_curves(known)),
        references=[Reference(value=1.0, colour=GREY, name="as fast as A")],
    )  # fmt: skip
    width = min(max(LEAST_INCHES, ROW_INCHES * len(known)), MOST_INCHES)
    title = f"Step of B over step of A, with {100 * CONFIDENCE:g} % intervals"
    return [Chart(name="ratios", title=title, settings=settings, panels=[panel], size=(width, 4.0), legend=3)]


def _curves(known: Sequence[Row]) -> Iterator[Curve]:
    """The points of each verdict; those in doubt are hollow."""
    for verdict, (colour, marker) in LOOKS.items():
        for is_doubted in (False, True):
            points = tuple(
                _point(row) for row in known if row["verdict"] == verdict and row["ratio_is_doubted"] is is_doubted
            )
            line = Line(name=f"{verdict}{', in doubt' if is_doubted else ''}", points=points)
            if points:
                yield Curve(line=line, colour=colour, marker=marker, dash="", is_hollow=is_doubted, size=6.0)


def _point(row: Row) -> Point:
    """The ratio with its interval, which ends where it says nothing more."""
    name, ratio, low, high = row["name"], row["ratio"], row["ratio_low"], row["ratio_high"]
    if low is None or high is None:
        return Point(x=name, value=ratio)
    above, below = min(high, ratio * WIDEST_RATIO) - ratio, ratio - max(low, ratio / WIDEST_RATIO)
    return Point(x=name, value=ratio, error=above, error_below=below)


def processes_chart(names: Sequence[str], means_s: Sequence[Sequence[float]]) -> Chart:
    """The mean step of each process of both sides, in the order in which they ran."""
    looks = [("A", "#0072B2", "o"), ("B", "#D55E00", "s")]
    curves = [
        Curve(
            line=Line(name=side, points=tuple(Point(x=i, value=1e3 * mean_s) for i, mean_s in enumerate(own, 1))),
            colour=colour, marker=marker, dash="", size=6.0,
        )
        for (side, colour, marker), own in zip(looks, means_s, strict=True)
    ]  # fmt: skip
    numbers = sorted({float(point.x) for curve in curves for point in curve.line.points})
    panel = Panel(x=Axis(label="process", ticks=numbers), y=Axis(label="mean step (ms)", unit="ms"), curves=curves)
    settings = "; ".join(f"{side} is {name or 'without flags'}" for side, name in zip("AB", names, strict=True))
    return Chart(name="processes", title="Step of each process", settings=settings, panels=[panel])
