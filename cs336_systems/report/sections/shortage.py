"""The table of what held the memory of a device when it did not suffice for a step."""

from ...loop_record import OutOfMemory
from ..columns import Column
from ..section import Table, make_table
from ..words import GIB, percent_of

HOLDERS = (
    Column(
        "what",
        about="Each storage counts once, for the first.",
        key="what",
        numeric=False,
        write=str,
    ),
    Column(
        "module", about="Where it was made, or whose it is.", key="module", numeric=False, write=str
    ),
    Column("memory", "GiB", "Blocks of the allocator.", key="held_bytes", scale=1 / GIB),
    Column("share", key="share", write=percent_of),
    Column("tensors", key="count", write=str, drop_order=1),
)
MOST = 20
"""Most rows; the others are summed in a last one."""


def shortage_table(told: OutOfMemory) -> Table:
    """A row for each category and part of the model."""
    shown = list(told.holders[:MOST])
    others = told.holders[MOST:]
    total = sum(holder.held_bytes for holder in told.holders) + (told.others_bytes or 0)
    rows = []
    for holder in shown:
        rows.append((holder.category, holder.module, holder.held_bytes, holder.count))
    if others:
        rest = sum(holder.held_bytes for holder in others)
        rows.append((f"{len(others)} others", "", rest, sum(holder.count for holder in others)))
    if told.others_bytes:
        rows.append(("other programs and the CUDA context", "", told.others_bytes, 0))
    table = []
    for what, module, held, count in rows:
        table.append(
            {
                "what": what,
                "module": module or None,
                "held_bytes": held,
                "share": held / total if total else None,
                "count": count or None,
            }
        )
    return make_table("What held the memory", HOLDERS, table)
