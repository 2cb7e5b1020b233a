"""What stands in a picture."""

import itertools

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text) if text.get_text() and text.get_visible()]


def overlaps(figure: Figure) -> list[tuple[str, str]]:
    """Pairs of texts that cover each other, and texts that leave the picture."""
    FigureCanvasAgg(figure).draw()
    shown = [text for text in figure.findobj(Text) if text.get_text().strip() and text.get_visible()]
    boxes = [(text.get_text(), text.get_window_extent()) for text in shown]
    pairs = [(a, b) for (a, at), (b, bt) in itertools.combinations(boxes, 2) if at.overlaps(bt)]
    whole = figure.bbox.padded(1)
    return [*pairs, *((text, "edge") for text, box in boxes if Bbox.union([box, whole]).width > whole.width)]
