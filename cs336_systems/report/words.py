"""Words that tables and pictures use for statuses, modes and warnings."""

from collections import Counter
from collections.abc import Sequence

from cs336_systems.config import Mode
from cs336_systems.record import Status
from cs336_systems.report.numbers import DOUBT

STATUS_WORDS = {
    Status.OK: "ok",
    Status.UNAVAILABLE: "no kernel",
    Status.OOM: "out of memory",
    Status.TIMEOUT: "timed out",
    Status.CRASHED: "crashed",
    Status.KILLED: "killed",
    Status.CUDA_ERROR: "CUDA error",
    Status.INVALID: "invalid record",
}
STEP_WORDS = {
    Mode.INFERENCE: "inference step",
    Mode.FORWARD: "forward pass",
    Mode.FORWARD_BACKWARD: "forward and backward pass",
    Mode.TRAIN: "training step",
}


def status_text(status: str) -> str:
    """A status in words: `out of memory` for `oom`."""
    return STATUS_WORDS[Status(status)]


def warning_counts(codes: Sequence[str | None], rows: str) -> str:
    """How many rows have each warning: `drift in 2 of 4 rows, unstable in 1 of 4 rows`; empty without warnings.

    `codes` has the warnings of each row, joined by semicolons; `rows` is what the rows are called.
    """
    counts = Counter(code for found in codes if found for code in found.split(";"))
    return ", ".join(f"{code} in {count} of {len(codes)} {rows}" for code, count in counts.most_common())


SHIPPED = (
    "These ceilings come with this program: they were measured on another machine, whose CPU and power limit may "
    "differ (cs336 ceilings measures those of this one)."
)
DOUBTED_FORECAST = (
    f"{DOUBT} marks a forecast from ceilings many of whose times are in doubt: measure them again on a quiet machine."
)
