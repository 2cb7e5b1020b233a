"""Why memory did not suffice for a step of a watched loop, in sentences."""

from collections import Counter
from collections.abc import Iterator

from ..loop_record import CACHED, Fit, OutOfMemory

GIB = 2**30
MIB = 2**20


def shortage_sentences(told: OutOfMemory) -> list[str]:
    """What did not fit, where, and what held most; then what would fit."""
    return [_what(told), *_where(told), *_advice(told)]


def amount(num_bytes: int) -> str:
    """Bytes in GiB, or in MiB where they are few."""
    if num_bytes >= GIB / 10:
        return f"{num_bytes / GIB:.2f} GiB"
    return f"{num_bytes / MIB:.2f} MiB"


def _what(told: OutOfMemory) -> str:
    """What was asked for, of how much, and the category that held most."""
    asked = "memory" if told.requested_bytes is None else amount(told.requested_bytes)
    step = f"step {told.step}" if told.step >= 0 else "a step of the warm-up"
    text = f"out of memory in {told.doing} of {step}: {asked} did not fit"
    if told.allocated_bytes is not None and told.room_bytes is not None:
        text += f" beside {amount(told.allocated_bytes)} of {amount(told.room_bytes)}"
    by_category = Counter[str]()
    for holder in told.holders:
        if holder.category != CACHED:
            by_category[holder.category] += holder.held_bytes
    if by_category:
        ((category, most),) = by_category.most_common(1)
        text += f"; most is {category}: {amount(most)}"
        parts = [holder for holder in told.holders if holder.category == category]
        if parts[0].module:
            text += f", of {parts[0].module} {amount(parts[0].held_bytes)}"
    return text


def _where(told: OutOfMemory) -> Iterator[str]:
    """The module and the lines."""
    module = f" in {told.module}" if told.module else ""
    line = f" at {told.line}" if told.line else ""
    if module or line:
        is_below = told.called_at != told.line
        loop = f", which the loop called at {told.called_at}" if is_below else ""
        yield f"it failed{module}{line}{loop}"


def _advice(told: OutOfMemory) -> Iterator[str]:
    """The batches that fit, and how this is known."""
    if told.fits:
        plain, *others = told.fits
        texts = [_fit(plain)]
        texts += [_fit(other) for other in others if other.batch_size > plain.batch_size]
        sizes = " and ".join(map(str, told.traced_batches))
        known = f"by a trace of the model at batches of {sizes}"
        taken = "".join(f"; {assumption}" for assumption in told.assumptions)
        batch = f"what would fit instead of batch {told.batch_size}"
        yield f"{batch}: {', or '.join(texts)} ({known}{taken})"
    if told.not_foretold:
        what = "what would fit with checkpoints" if told.fits else "what would fit"
        yield f"{what} is not foretold: {told.not_foretold}"


def _fit(fit: Fit) -> str:
    """A batch, and what its steps take."""
    with_checkpoints = " with checkpoints around every block" if fit.is_checkpointed else ""
    if not fit.batch_size:
        return f"not even batch 1{with_checkpoints}, which needs {amount(fit.reserved_bytes)}"
    return f"batch {fit.batch_size}{with_checkpoints}, which takes {amount(fit.peak_bytes)}"
