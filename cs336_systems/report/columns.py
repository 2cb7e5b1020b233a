"""Columns of tables: what stands above each, and how a value below it is said."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypedDict, TypeVar, Unpack

from cs336_systems.report.numbers import change, count, in_percent, label, mean_and_std, rounded, significant

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Column(Generic[Row]):
    """A column of a table. A row is a mapping with the value under `key`, or any object that `says` turns to text."""

    name: str
    unit: str = ""
    numeric: bool = True
    """Numbers stand to the right."""
    spare: int = 0
    """Above 0, a terminal too narrow for the table leaves the column out, the highest number first."""
    says: Callable[[Row], str] | None = None
    """The cell of a row, where it is not the value of `key` alone; unknown is an empty text."""
    key: str = ""
    """Name of the value in a row and in CSV files."""
    scale: float = 1
    """What the value is multiplied by to be in `unit`."""
    write: Callable[[Any], str] = significant
    """How the scaled value is written."""
    std: str = ""
    """Key of the standard deviation, in the unit of the value, where the cell has it too."""
    about: str = ""
    """What it is, in a sentence."""

    @property
    def label(self) -> str:
        """Name and unit on one line."""
        return f"{self.name} ({self.unit})" if self.unit else self.name

    def cell(self, row: Row) -> str:
        """What a row has below this heading; empty for unknown."""
        if self.says is not None:
            return self.says(row)
        if not isinstance(row, Mapping):
            raise TypeError(f"column {self.name!r} needs rows with values by key, or says, got {type(row).__name__}")
        value, std = row[self.key], row[self.std] if self.std else None
        if value is None:
            return ""
        if self.std and value:
            return mean_and_std(value * self.scale, None if std is None else std * self.scale)
        return self.write(value if self.scale == 1 else value * self.scale)


class Changes(TypedDict, total=False):
    """What one table may have otherwise than COLUMNS; see `Column`."""

    name: str
    unit: str
    spare: int
    says: Callable[[Any], str]
    scale: float
    write: Callable[[Any], str]
    std: str


def column(key: str, **changes: Unpack[Changes]) -> Column[Any]:
    """The column of this key as COLUMNS has it, with `changes` for one table."""
    found: Column[Any] = replace(COLUMNS[key], key=key, **changes)
    return found


STEP_INTERVAL: Column[Any] = Column("95 % interval", "ms, over processes", spare=1)
"""Of the mean step, over the means of fresh processes (Student's t)."""

COLUMNS: dict[str, Column[Any]] = {
    "phase": Column("phase", numeric=False, write=str, about="Phase of a training step, or the whole step."),
    "share": Column("share", "%", spare=1, write=in_percent, about="Part of the sum of all rows."),
    # kernels, per step
    "kernels_per_step": Column("kernels", spare=4, write=count, about="Kernels that were launched."),
    "kernel_mean_ms": Column("GPU time", "ms", write=rounded, about="Durations of the kernels, added up."),
    "wall_mean_ms": Column(
        "wall", "ms", spare=1, write=rounded, about="Time on the device until the phase's last kernel has ended."
    ),
    "busy_share": Column(
        "GPU busy", "%", spare=2, write=in_percent, about="Part of the wall time in which a kernel or copy ran."
    ),
    "host_mean_ms": Column(
        "CPU", "ms", spare=5, write=rounded, about="Time that the host was in the phase, waits included."
    ),
    "host_per_launch_s": Column(
        "CPU per launch", "µs", spare=6, scale=1e6, about="The host's time in the phase, over its launches."
    ),
    "copies_per_step": Column("copies", spare=8, write=count, about="Copies and fills by the driver."),
    "recomputed_mean_ms": Column(
        "recomputed", "ms", spare=7, write=rounded, about="GPU time of forward that backward does again."
    ),
    "clock_mean_ms": Column("clock", "ms", spare=3, about="Time of the same phase in a run without a profiler."),
    "wall_over_clock": Column(
        "wall vs clock",
        "%",
        spare=5,
        write=change,
        about="By how much the wall time is longer than without a profiler.",
    ),
    "plain_step_mean_ms": Column("step", "ms", about="Mean step of the run without a profiler."),
    "profiled_step_mean_ms": Column("with profiler", "ms", spare=1, about="Mean step of the profiled run."),
    "slowdown": Column(
        "slowdown", "times", write=partial(significant, digits=3), about="Profiled step over plain step."
    ),
    "total_ms_per_step": Column("time", "ms", write=rounded, about="Durations of these kernels, added up."),
    "count_per_step": Column("launches", write=count, about="Launches of these kernels."),
    "class": Column("class", numeric=False, write=str, about="What kind of work the kernels do, by their names."),
    "short_name": Column(
        "kernel", numeric=False, write=label, about="Name of the kernel without its template arguments."
    ),
    "mean_s": Column("mean", "µs", spare=4, scale=1e6, about="Mean duration of one launch."),
    "median_s": Column("median", "µs", spare=6, scale=1e6, about="Median duration of one launch."),
    "min_s": Column("min", "µs", spare=8, scale=1e6, about="Shortest launch."),
    "max_s": Column("max", "µs", spare=7, scale=1e6, about="Longest launch."),
    "std_s": Column("std", "µs", spare=5, scale=1e6, about="Standard deviation of the launches' durations."),
    "of": Column("of", numeric=False, write=str, about="Forward, or the whole step."),
    "linear_per_step": Column("linear", write=count, about="Matrix products of linear layers."),
    "linear_ms_per_step": Column(
        "linear time", "ms", write=rounded, about="GPU time of linear layers' matrix products."
    ),
    "attention_per_step": Column("attention", write=count, about="Matrix products of attention's scores and values."),
    "attention_ms_per_step": Column(
        "attention time", "ms", write=rounded, about="GPU time of attention's matrix products."
    ),
    "unknown_per_step": Column(
        "unknown", write=count, about="Matrix products that may be a linear layer's or attention's."
    ),
    "unknown_ms_per_step": Column("unknown time", "ms", write=rounded, about="GPU time of those."),
    "linear_expected": Column(
        "expected", spare=2, write=count, about="One for each linear layer in forward, two in backward."
    ),
    "as_expected": Column(
        "as expected", numeric=False, spare=1, write=str, about="Whether as many were launched as expected."
    ),
    "part": Column("part", numeric=False, write=str, about="Scores, softmax or values."),
    "share_of_attention": Column("share", "%", spare=1, write=in_percent, about="Part of attention's GPU time."),
    "share_of_phase": Column("of phase", "%", spare=4, write=in_percent, about="Part of the phase's GPU time."),
    "products_ms_per_step": Column("products", "ms", spare=1, write=rounded, about="GPU time of matrix products."),
    "flops_per_step": Column("FLOPs", "G", spare=7, scale=1e-9, about="Floating-point operations."),
    "flops_per_s": Column(
        "rate", "TFLOP/s", spare=3, scale=1e-12, write=partial(significant, digits=3), about="FLOPs over GPU time."
    ),
    "softmax_ms_per_step": Column("softmax", "ms", write=rounded, about="GPU time of the softmax."),
    "whole_ms_per_step": Column(
        "all of attention", "ms", spare=2, write=rounded, about="GPU time of all kernels of attention."
    ),
    "time_ratio": Column(
        "time ratio", spare=3, write=partial(significant, digits=3), about="Softmax over matrix products, in time."
    ),
    "flops_ratio": Column(
        "FLOP ratio", spare=3, write=partial(significant, digits=3), about="Softmax over matrix products, in FLOPs."
    ),
    "time_per_flop_ratio": Column(
        "time per FLOP",
        spare=3,
        write=partial(significant, digits=3),
        about="Softmax over matrix products, in time per FLOP.",
    ),
    # memory
    "quantity": Column("quantity", numeric=False, write=str, about="What the value is of."),
    "value": Column("value", about="Bytes, or how many."),
    "about": Column("what it is", numeric=False, spare=2, write=str, about="What the quantity is, in words."),
    "category": Column("category", numeric=False, spare=3, write=str, about="What the memory is used for."),
    "bytes": Column("size", about="Bytes in blocks of the allocator."),
    "requested_bytes": Column("asked for", about="Bytes that the program asked for; a block may be larger."),
    "blocks": Column("blocks", spare=2, write=count, about="Blocks of the allocator."),
    "status": Column("status", numeric=False, write=str, about="How the run ended."),
    "peak_allocated_bytes": Column("peak", about="The most that was allocated at any time."),
    "peak_phase": Column("in", numeric=False, write=str, about="The phase in which memory was at its peak."),
    "plain_peak_allocated_bytes": Column(
        "without recording", about="The allocator's own peak in a run that was not recorded."
    ),
    "predicted_peak_allocated_bytes": Column(
        "predicted", about="The peak that the configuration was predicted to have."
    ),
    "peak_reserved_bytes": Column("reserved", about="The most that PyTorch held in segments at any time."),
    "residual_stream_bytes": Column("residual", about="One tensor of batch x context x d_model in fp32."),
    "block_saved_bytes": Column("saved per block", about="What a typical block of the model saves for backward."),
    "block_gradient_bytes": Column("gradients per block", about="Gradients of a typical block of the model."),
    "step": Column("step", write=str, about="Number of the recorded step, from 0."),
    "moment": Column("moment", numeric=False, write=str, about="When: the end of a phase, or the peak."),
    "time_s": Column("at", "ms", spare=4, about="Time from the first recorded event."),
    "allocated_bytes": Column("allocated", about="All categories together, in blocks."),
    "counted_bytes": Column("PyTorch's count", about="What PyTorch's allocator itself counted."),
    "counted_requested_bytes": Column("PyTorch's count", about="What PyTorch's allocator counted as asked for."),
    "reserved_bytes": Column("reserved", about="Segments that PyTorch held then."),
    "begin_s": Column("begins", "ms", spare=3, about="Time from the first recorded event to the phase's start."),
    "duration_s": Column("takes", "ms", spare=3, about="Time from the phase's start to its end."),
    "begin_bytes": Column("at its start", about="Allocated when the phase began."),
    "peak_bytes": Column("peak", about="The most that was allocated during the phase."),
    "peak_s": Column("peak at", "ms", spare=4, about="Time from the first recorded event to the phase's peak."),
    "end_bytes": Column("at its end", about="Allocated when the phase ended."),
    "count": Column("count", spare=2, write=count, about="Allocations that are alike."),
    "bytes_at_peak": Column("together", about="Bytes of all of them at the peak, in blocks."),
    "share_of_peak": Column("share", "%", spare=1, write=in_percent, about="Part of the peak."),
    "count_at_peak": Column("count", spare=2, write=count, about="How many of them there were at the peak."),
    "name": Column("name", numeric=False, write=label, about="Name of the tensor in the model."),
    "shape_and_type": Column("shape", numeric=False, spare=7, write=str, about="Shape and data type of the tensor."),
    "explanation": Column(
        "formula", numeric=False, spare=5, write=str, about="The size as a product of the model's dimensions."
    ),
    "place": Column("place", numeric=False, spare=6, write=str, about="The line of code that allocated it."),
}
"""The columns that tables name by key, with the unit, digits and place that most tables give them."""
