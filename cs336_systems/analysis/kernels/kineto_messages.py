"""What a collective exchanges, from the arguments of its kernel and of the operator that started
it.
"""

from collections.abc import Callable, Sequence

from .kineto_events import Args
from .trace import Message

MAX_COUNT = 2**48
"""Largest number of ranks or elements that is read, so that sums of bytes are exact."""

_ELEMENT_BYTES = {
    "Byte": 1,
    "Char": 1,
    "Bool": 1,
    "Float8_e4m3fn": 1,
    "Float8_e5m2": 1,
    "Short": 2,
    "Half": 2,
    "BFloat16": 2,
    "Int": 4,
    "Float": 4,
    "Long": 8,
    "Double": 8,
}
"""Bytes of an element, by PyTorch's names of types."""
_UNDEFINED = "undefined"
"""What PyTorch writes for a process group without a description."""


def message_of(said: Sequence[Args]) -> Message:
    """The message; of several sayings about one thing, the first counts."""

    def first(name: str) -> object:
        values = [getattr(args, name) for args in said]
        return next((value for value in values if value is not None), None)

    description = str(first("group_description") or "")
    ranks = str(first("group_ranks") or "")
    return Message(
        group=str(first("group_name") or ""),
        ranks=ranks,
        description="" if description == _UNDEFINED else description,
        size=_count(first("group_size")) or _num_ranks(ranks),
        num_bytes=_num_bytes(first),
    )


def _count(value: object) -> int | None:
    """The value if it can be a number of ranks or elements."""
    return value if isinstance(value, int) and 0 <= value <= MAX_COUNT else None


def _num_ranks(ranks: str) -> int | None:
    """How many ranks the text lists; PyTorch shortens long lists."""
    return ranks.count(",") + 1 if ranks and "..." not in ranks else None


def _num_bytes(first: Callable[[str], object]) -> int | None:
    """Bytes of the whole tensor, which is the larger of what goes in and what comes out."""
    element_bytes = _ELEMENT_BYTES.get(str(first("dtype")))
    counts = [_count(first("elements_in")), _count(first("elements_out"))]
    known = [count for count in counts if count is not None]
    return max(known) * element_bytes if known and element_bytes else None
