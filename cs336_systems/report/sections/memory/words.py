"""How tables, pictures and sentences about memory write sizes, moments, shapes and places."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ....analysis.memory.profile import FailedRequest, LikeAllocations, MemoryProfile, Moment, Place
from ....text import counted
from ...columns import Column, column
from ...words import GIB, MIB, label, significant
from .entry import difference_bytes

KIB = 2**10


@dataclass(frozen=True, slots=True)
class MemoryUnit:
    """A unit of memory with fixed decimals, so that the cells of a table can be compared at a
    glance.
    """

    name: str
    num_bytes: int
    decimals: int

    def cell(self, num_bytes: int) -> str:
        """The bytes in this unit; `< 0.01` for what is more than nothing but less than the
        decimals show.
        """
        least = 10.0**-self.decimals
        value = num_bytes / self.num_bytes
        if num_bytes and abs(value) < least / 2:
            return f"< {least:.{self.decimals}f}"
        return f"{value:,.{self.decimals}f}" if num_bytes else "0"


GIB_CELL, MIB_CELL = MemoryUnit("GiB", GIB, 2), MemoryUnit("MiB", MIB, 2)


def unit_for(largest_bytes: int) -> MemoryUnit:
    """GiB for a table whose largest value is at least one, MiB below."""
    return MemoryUnit("GiB", GIB, 3) if largest_bytes >= GIB else MIB_CELL


def in_unit(key: str, unit: MemoryUnit, name: str = "", drop_order: int | None = None) -> Column:
    """The column of bytes of this key in this unit, in one table under another name or with
    another order.
    """
    usual = column(key, unit=unit.name, write=unit.cell)
    order = usual.drop_order if drop_order is None else drop_order
    return replace(usual, name=name or usual.name, drop_order=order)


def size(num_bytes: int) -> str:
    """The bytes for a sentence: `18.84 GiB`, `6.25 MiB`, one decimal from 100 on; below a KiB
    whole.
    """
    for name, unit in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= unit:
            digits = 1 if abs(num_bytes) >= 100 * unit else 2
            return f"{num_bytes / unit:,.{digits}f} {name}"
    return counted(num_bytes, "byte")


def about(profile: MemoryProfile) -> str:
    """Which file, device and steps the tables are of, as a sentence."""
    steps = f"{profile.num_steps:,} steps, counted from 0"
    if profile.num_steps < 2:
        steps = "1 step, number 0" if profile.num_steps else "no steps known to the file"
    return f"{label(profile.source)}, GPU {profile.device}, {steps}."


def when(moment: Moment | FailedRequest) -> str:
    """The moment for a sentence: `15.0 ms after the first event, in backward of step 0`; empty if
    nothing is known of it.
    """
    parts = []
    if moment.time_s is not None:
        parts.append(f"{moment_ms(moment.time_s)} ms after the first event")
    step = f"step {moment.step}" if moment.step >= 0 else ""
    if place := " of ".join(part for part in (label(moment.phase), step) if part):
        parts.append(f"in {place}")
    if moment.ranges:
        parts.append(f"in the range {label(moment.ranges)}")
    return ", ".join(parts)


def moment_ms(time_s: float) -> str:
    """A time in seconds, written in ms: with one decimal, or with three significant digits if that
    shows more.
    """
    return f"{time_s * 1e3:,.1f}" if time_s >= 0.01 else significant(time_s * 1e3, 3)


def check_words(moments: Iterable[Moment]) -> str:
    """By how much categories, which add up to what is allocated, differ from the allocator's own
    count, as a sentence; empty where they agree or nothing was counted.
    """
    differences = [difference_bytes(moment) for moment in moments]
    known = [difference for difference in differences if difference is not None]
    wrong = [difference for difference in known if difference]
    if not wrong:
        return ""
    return (
        f"Check failed: at {len(wrong):,} of {len(known):,} boundaries the blocks of the "
        "snapshot differ from what PyTorch's allocator counted, by "
        f"{max(wrong, key=abs):+,} bytes at most."
    )


def shape_text(shape: tuple[int, ...], dtype: str) -> str:
    """Shape and data type as far as they are known: `4 x 512 x 768 float32`."""
    return " ".join(part for part in (" x ".join(map(str, shape)), label(dtype)) if part)


def made_at(allocation: LikeAllocations | FailedRequest) -> str:
    """The innermost place and module, as far as they are known."""
    place = innermost(allocation.places)
    module = label(allocation.module)
    return " in ".join(part for part in (place, module) if part)


def innermost(places: Sequence[Place]) -> str:
    """The innermost place, `model/transformer.py:123 softmax`; empty without a stack."""
    if not places:
        return ""
    place = places[0]
    return f"{label(place.file)}:{place.line} {label(place.function)}".strip()
