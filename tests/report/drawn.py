"""What stands in a picture."""

import itertools
from collections.abc import Iterator

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox


def texts(figure: Figure) -> list[str]:
    return [
        text.get_text() for text in figure.findobj(Text) if text.get_text() and text.get_visible()
    ]


def overlaps(figure: Figure) -> list[tuple[str, str]]:
    """Pairs of texts that cover each other, and texts that leave the picture."""
    FigureCanvasAgg(figure).draw()
    unseen = {id(label) for label in _labels_out_of_view(figure)}
    shown = [
        t
        for t in figure.findobj(Text)
        if t.get_text().strip() and t.get_visible() and id(t) not in unseen
    ]
    boxes = [(text.get_text(), text.get_window_extent()) for text in shown]
    pairs = [(a, b) for (a, at), (b, bt) in itertools.combinations(boxes, 2) if at.overlaps(bt)]
    whole = figure.bbox.padded(1)
    return [
        *pairs,
        *((text, "edge") for text, box in boxes if Bbox.union([box, whole]).width > whole.width),
    ]


def _labels_out_of_view(figure: Figure) -> Iterator[Text]:
    """Of ticks beyond the limits of their axis, which matplotlib keeps and does not draw."""
    for axis in (axis for panel in figure.axes for axis in (panel.xaxis, panel.yaxis)):
        low, high = sorted(axis.get_view_interval())
        for tick in axis.get_major_ticks():
            if not low <= tick.get_loc() <= high:
                yield from (tick.label1, tick.label2)
