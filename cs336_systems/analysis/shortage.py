"""Why memory did not suffice for a step of a watched loop, in sentences."""

from collections import Counter
from collections.abc import Iterator

from ..loop_record import Fit, OutOfMemory

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
        by_category[holder.category] += holder.held_bytes
    if by_category:
        ((category, most),) = by_category.most_common(1)
        text += f"; most was held by {category}: {amount(most)}"
    return text


def _where(told: OutOfMemory) -> Iterator[str]:
    """The module and the lines."""
    places = []
    if told.module:
        places.append(f"in {told.module}")
    lines = dict.fromkeys(line for line in (told.line, told.called_at) if line)
    places += [f"at {line}" for line in lines]
    if places:
        yield f"it failed {', called '.join(places)}"


def _advice(told: OutOfMemory) -> Iterator[str]:
    """The batches that fit, and how this is known."""
    if told.not_foretold:
        yield f"what would fit is not foretold: {told.not_foretold}"
    if not told.fits:
        return
    plain, *others = told.fits
    texts = [_fit(plain)]
    texts += [_fit(other) for other in others if other.batch_size > plain.batch_size]
    sizes = " and ".join(map(str, told.traced_batches))
    known = f"by a trace of the model at batches of {sizes}"
    taken = "".join(f"; {assumption}" for assumption in told.assumptions)
    batch = f"what would fit instead of batch {told.batch_size}"
    yield f"{batch}: {', or '.join(texts)} ({known}{taken})"


def _fit(fit: Fit) -> str:
    """A batch, and what its steps take."""
    with_checkpoints = " with checkpoints around every block" if fit.is_checkpointed else ""
    if not fit.batch_size:
        return f"not even batch 1{with_checkpoints}, which needs {amount(fit.reserved_bytes)}"
    return f"batch {fit.batch_size}{with_checkpoints}, which takes {amount(fit.peak_bytes)}"
