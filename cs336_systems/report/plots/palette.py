"""Colours of all pictures, of PNGs and of the page; nothing here draws."""

from typing import Final

from cs336_systems.analysis.kernels.classes import KernelClass
from cs336_systems.analysis.memory.profile import Category
from cs336_systems.config import Phase, Precision

PHASE_COLOURS = {
    Phase.FORWARD: "#0072B2",
    Phase.BACKWARD: "#E69F00",
    Phase.COMMUNICATION: "#CC79A7",
    Phase.OPTIMIZER: "#009E73",
}
PRECISION_COLOURS = {
    Precision.FP32: "#333333",
    Precision.TF32: "#CC79A7",
    Precision.BF16: "#D55E00",
    Precision.FP16: "#56B4E9",
}
"""The palette of Okabe and Ito (2008), which people with any colour vision tell apart."""
CLASS_COLOURS = {
    KernelClass.MATMUL: "#0072B2",
    KernelClass.ATTENTION: "#56B4E9",
    KernelClass.SOFTMAX: "#D55E00",
    KernelClass.ELEMENT_WISE: "#E69F00",
    KernelClass.NORMALISATION: "#701C70",
    KernelClass.REDUCTION: "#009E73",
    KernelClass.OPTIMIZER: "#F0E442",
    KernelClass.COPY_AND_FILL: "#6A6A6A",
    KernelClass.COMMUNICATION: "#222222",
    KernelClass.OTHER: "#CC79A7",
}
"""Colours in the order of drawing; neighbours differ in grey too."""
CATEGORY_COLOURS = {
    Category.HELD: "#BBBBBB",
    Category.PARAMETERS: "#0072B2",
    Category.BUFFERS: "#CC79A7",
    Category.OPTIMIZER_STATE: "#009E73",
    Category.GRADIENTS: "#F0E442",
    Category.AUTOCAST_COPIES: "#701C70",
    Category.SAVED: "#56B4E9",
    Category.LATER: "#E69F00",
    Category.TEMPORARY: "#D55E00",
}
"""Colours from the bottom of a picture to its top, long-lived categories first."""
REST_COLOUR: Final = "#BBBBBB"
FAILURE_COLOUR: Final = "#B00020"
GREY: Final = "#777777"
"""Colour of values from data sheets, and of other lines that are not measured."""
BLACK, WHITE, DARK_PAPER, GREY_INK = "#000000", "#FFFFFF", "#14171B", "#E6E9ED"
INKS = ("#000001", "#FFFFFE")
"""Black and white of words on colours, which are the same on dark paper."""
_VIRIDIS = ("#440154", "#3B528B", "#21918C", "#5EC962", "#FDE725")
"""Colours of matplotlib's map of this name, equally far apart."""


def blend(first: str, second: str, weight: float) -> str:
    """Mixture of the colours: the first at weight 0, the second at weight 1."""
    pairs = zip(bytes.fromhex(first[1:]), bytes.fromhex(second[1:]), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * weight):02X}" for a, b in pairs)


def shades(count: int) -> list[str]:
    """Colours from light to dark that also differ in grey, for things in an order."""
    places = [(0.85 - 0.85 * i / max(1, count - 1)) * (len(_VIRIDIS) - 1) for i in range(count)]
    return [blend(_VIRIDIS[int(place)], _VIRIDIS[int(place) + 1], place % 1) for place in places]


def tints(colour: str, count: int) -> list[str]:
    """The colour from pale to full."""
    return [blend("#FFFFFF", colour, 1.0 if count == 1 else 0.45 + 0.55 * i / (count - 1)) for i in range(count)]


def ink(colour: str) -> str:
    """Black or white, whichever is easier to read on the colour; on dark paper it changes where the colour does."""
    light, dark = (BLACK, WHITE) if is_grey(colour) else INKS
    return light if contrast(colour, BLACK) > contrast(colour, WHITE) else dark


def on_dark(colour: str) -> str:
    """The colour on the page's dark paper: greys from white to black turn around, too dark colours get lighter."""
    if is_grey(colour):
        return blend(GREY_INK, DARK_PAPER, int(colour[1:3], 16) / 255)
    weights = (step / 20 for step in range(21))
    lighter = (blend(colour.upper(), WHITE, weight) for weight in weights)
    return colour if colour.upper() in INKS else next(own for own in lighter if contrast(own, DARK_PAPER) >= 3)


def is_grey(colour: str) -> bool:
    """Whether it has no hue."""
    return len(set(bytes.fromhex(colour[1:]))) == 1


def contrast(first: str, second: str) -> float:
    """The contrast of two colours by WCAG 2, from 1 to 21; a line needs 3."""
    low, high = sorted(map(_luminance, (first, second)))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    shares = [value / 255 for value in bytes.fromhex(colour[1:])]
    channels = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shares]
    return sum(weight * channel for weight, channel in zip((0.2126, 0.7152, 0.0722), channels, strict=True))
