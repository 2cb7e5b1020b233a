"""All columns of tables but those that one table alone has, by key.

Those of results.csv, which the table of a sweep shows too, are declared in `quantities.py`, and
those of profiles in `profile_columns.py`.
"""

from dataclasses import replace
from typing import Any

from .column import (
    Column,
    Row,
    count_column,
    four_decimals,
    rounded_ms,
    short,
    signed,
    six_digits,
    text_column,
    three_digits,
    two_digits,
)
from .profile_columns import OF_PROFILES
from .quantities import Gain, StepResult
from .words import amount, in_percent, interval_text, rounded, scientific

__all__ = ["COLUMNS", "Column", "Row", "column", "columns_of", "short", "three_digits"]

WIDEST_RATIO = 1000
"""An interval of a ratio that reaches beyond this factor says nothing."""


def column(key: str, **changes: Any) -> Column:  # noqa: ANN401 (fields of Column)
    """The column of this key in COLUMNS, with `changes` for a single table.

    If the value is derived from times, the row has its deviation and its doubt under `KEY_std` and
    `KEY_is_doubted`.
    """
    changed = replace(COLUMNS[key], key=key, **changes)
    if not changed.derived:
        return changed
    return replace(changed, std=f"{key}_std", doubt=f"{key}_is_doubted")


def columns_of(*parts: str | Column) -> list[Column]:
    """The columns of these keys in COLUMNS, in order; a `Column` stands for itself."""
    return [column(part) if isinstance(part, str) else part for part in parts]


def _ratio(row: Row) -> str:
    """A ratio of times as text, with enough digits that it lies visibly within its interval."""
    interval = {"low": row["ratio_low"], "high": row["ratio_high"]}
    return Gain(row["ratio"], is_doubted=bool(row["doubts"]), **interval).text()


def _ratio_interval(row: Row) -> str:
    """The 95 % interval of a ratio as text, or that it is too wide to be worth writing."""
    low, high = row["ratio_low"], row["ratio_high"]
    if high is not None and (high > WIDEST_RATIO or low < 1 / WIDEST_RATIO):
        return f"wider than {WIDEST_RATIO:,} times"
    return interval_text(low, high)


def _flops(name: str, about: str, drop_order: int) -> Column:
    """A column of FLOPs in TFLOP."""
    return Column(name, "TFLOP", about, drop_order, scale=1e-12, write=rounded)


_OF_STEPS: dict[str, Column] = {entry.key: entry for entry in StepResult.entries() if entry.name}
# in each: heading, unit, explanation, and the order in which narrow terminals drop columns
COLUMNS = (
    _OF_STEPS
    | OF_PROFILES
    | {
        "phase": text_column("phase", "Phase of a training step, or the whole step."),
        "share": Column("share", "%", "Part of the sum of all rows.", 1, write=in_percent),
        # the forecast of times, against measured ones
        "predicted_ms": rounded_ms(
            "predicted", "Time that follows from the ceilings.", doubt="prediction_is_doubted"
        ),
        "kernels_ms": rounded_ms("kernels", "Time of the kernels alone."),
        "scored": text_column("steps", "Which of the measured steps."),
        "num_scored": count_column("count", "Measured configurations."),
        "median_error": Column(
            "median error", "%", "Median of the errors, their signs left out.", write=two_digits
        ),
        "error_of_nine": Column(
            "9 of 10 within",
            "%",
            "Largest error of the nine tenths that miss least.",
            write=two_digits,
        ),
        "largest_error": Column("largest", "%", "The largest error.", write=two_digits),
        "median_bias": Column(
            "bias",
            "%",
            "Median of the errors with their signs: below 0 the forecast is too short.",
            write=signed,
        ),
        "inside": Column(
            "inside",
            "%",
            "Steps whose measured time lies in the interval in which nine of ten should.",
            1,
            write=three_digits,
        ),
        "named_right": Column(
            "limit right",
            "%",
            "Steps of which the forecast names the limit that was measured.",
            1,
            write=three_digits,
        ),
        # the study of precision
        "model": text_column("model", "The model that was observed."),
        "dtype": text_column("dtype", "Data type."),
        "sum_dtype": text_column("sum", "Data type of the sum."),
        "addend_dtype": text_column("addend", "Data type of what is added."),
        "cast": text_column(
            "cast",
            "Whether each addend is cast to the sum's type.",
            write=lambda cast: "explicit" * cast,
        ),
        "total": Column("result", "", "The sum at the end.", write="{:.4f}".format),
        "error": Column(
            "error", "", "By how much the sum misses the exact one.", write=four_decimals
        ),
        "storage_error": Column(
            "storing",
            "",
            "Part of the error that comes from storing the addend in its type.",
            2,
            write=four_decimals,
        ),
        "rounding_error": Column(
            "rounding",
            "",
            "Part of the error that comes from rounding the sum each time.",
            3,
            write=four_decimals,
        ),
        "growing_additions": Column(
            "additions", "", "Additions that changed the sum.", 1, write=str
        ),
        "activations": text_column(
            "activations", "The two values of the activations, each of half of them."
        ),
        "variance": Column(
            "variance",
            "",
            "Computed with every operation in the data type.",
            write="{:.3g}".format,
            instead="variance_failure",
        ),
        "exact_variance": Column(
            "exact variance", "", "Computed in fp64.", 2, write="{:.3g}".format
        ),
        "output": Column(
            "output",
            "",
            "The first normalised value, every operation in the data type.",
            write=six_digits,
            instead="output_failure",
        ),
        "exact_output": Column("exact output", "", "Computed in fp64.", 1, write=six_digits),
        "library_output": Column(
            "layer_norm's output",
            "",
            "What PyTorch's layer norm makes of the same activations.",
            3,
            write=six_digits,
            instead="output_failure",
        ),
        # two configurations compared
        "side": text_column("side", "A or B of a comparison."),
        "configuration": text_column("configuration", "Flags or path of a side."),
        # two sweeps compared
        "a_step_mean_ms": Column(
            "step of A",
            "ms",
            "Mean step of A, with its deviation; how its runs ended without one.",
            3,
            std="a_step_std_ms",
            instead="a_ended",
        ),
        "b_step_mean_ms": Column(
            "step of B",
            "ms",
            "Mean step of B, with its deviation; how its runs ended without one.",
            3,
            std="b_step_std_ms",
            instead="b_ended",
        ),
        "a_tokens_per_s": Column("tokens/s of A", "", "Tokens over time.", 1),
        "b_tokens_per_s": Column("tokens/s of B", "", "Tokens over time.", 1),
        "ratio": Column(
            "B / A",
            "",
            "Step of B over step of A, or of such times per token: below 1, B is faster.",
            text=_ratio,
        ),
        "ratio_low": Column(
            "interval",
            "",
            "Interval of the ratio beside it.",
            2,
            numeric=False,
            text=_ratio_interval,
        ),
        "verdict": text_column("B is", "Faster or slower than A, or why that is not known."),
        "a_processes": Column(
            "processes of A", "", "Fresh processes of A that were measured.", 5, write=str
        ),
        "b_processes": Column(
            "processes of B", "", "Fresh processes of B that were measured.", 5, write=str
        ),
        # tables of quantities
        "amount": Column("value", "", "How much of the quantity.", write=amount),
        "unit": text_column("unit", "Unit of the value."),
        "how": text_column("how", "How the value follows from those above.", 1),
        "question": text_column("question", "What is asked."),
        "answer": Column("answer", "", "The answer; empty where it is not known.", write=amount),
        # the account of a step
        "component": text_column("part", "Part of the model."),
        "parameters": count_column("parameters", "Parameters of the part.", 3),
        "forward_flops": _flops("forward", "FLOPs of forward.", 1),
        "backward_flops": _flops("backward", "FLOPs of backward.", 2),
        "step_flops": _flops("step", "FLOPs of forward and backward.", 0),
        "step_causal_flops": _flops(
            "step, causal", "FLOPs of forward and backward, attention counted as causal.", 5
        ),
        "forward_moved_bytes": Column(
            "moved forward", "MiB", "What its kernels read and write in forward.", 4, scale=2**-20
        ),
        "backward_moved_bytes": Column(
            "moved backward", "MiB", "What its kernels read and write in backward.", 5, scale=2**-20
        ),
        "what": text_column("what", "What it is."),
        "size_bytes": Column("size", "MiB", "Bytes of all of them.", scale=2**-20),
        "num_bytes": Column("tensors", "MiB", "Those of one call together.", scale=2**-20),
        "sent_bytes": Column(
            "sent", "MiB", "By each rank in all these calls, if all form a ring.", scale=2**-20
        ),
        "formula": text_column(
            "bytes of each", "Size of one as a product of the model's dimensions.", 2
        ),
        "bound_by": text_column("bound by", "Whether memory or arithmetic sets the time.", 1),
        "least_s": Column("takes at least", "ms", "The least time by the data sheet.", scale=1e3),
        # a step on many GPUs
        "way": text_column("way", "How the ranks share a step."),
        "ranks": count_column("ranks", "GPUs that share a step."),
        "step_ms": rounded_ms("step", "Predicted time of a step.", doubt="prediction_is_doubted"),
        "compute_ms": rounded_ms(
            "computing", "The step without communication.", 3, doubt="prediction_is_doubted"
        ),
        "exposed_ms": rounded_ms(
            "exposed", "Communication for which the kernels wait.", doubt="prediction_is_doubted"
        ),
        "peak_gib": Column(
            "memory", "GiB", "Peak of the rank that keeps most.", write=three_digits
        ),
        "layout": text_column(
            "layout",
            "How GPUs share a step: DP replicas, FSDP or ZeRO shards, TP tensor, PP pipeline, CP "
            "context and EP expert ranks.",
            wraps=False,
        ),
        "micro_batch": count_column("batch", "Sequences of one forward pass of a rank."),
        "accumulate": count_column(
            "accumulated", "Micro-batches of a step, one after the other.", 4
        ),
        "checkpoint": Column(
            "checkpoints",
            "",
            "1: each block keeps its input only; 2: also q, k, v and attention's result.",
            2,
            write=str,
        ),
        "bubble_ms": rounded_ms("bubble", "Time in which stages of a pipeline wait.", 5),
        "run_by": text_column(
            "run by",
            "The command that runs it here, or what of it is not run here.",
            6,
            wraps=False,
        ),
        # what ranks compute and send, on paper
        "part": text_column("part", "What is computed."),
        "pass": text_column("pass", "Forward or backward."),
        "sent": text_column("bytes sent", "Bytes that a rank sends, as an expression."),
        "sent_ms": rounded_ms("sent", "Time in which it sends them."),
        "flops_expression": text_column("FLOPs of a rank", "Those of a rank in this pass.", 4),
        "flops": Column("FLOPs", "", "Those of a rank in this pass.", 3, write=scientific),
        "computed_ms": rounded_ms("computing", "Time of the matmuls of the pass."),
        "overlapped_ms": rounded_ms("overlapped", "The longer of computing and sending.", 1),
        "summed_ms": rounded_ms("summed", "Computing and sending, one after the other.", 2),
        "expression": text_column("expression", "As an expression."),
        # the study of attention
        "compile_s": Column(
            "compiling", "s", "The longest compilation of its processes.", 2, write=short
        ),
        "d_head": Column("d_head", "", "Width of queries, keys and values.", write=str),
        "context_length": Column("context", "", "Tokens in a sequence.", write=str),
        "before_backward_mib": Column(
            "before backward", "MiB", "Memory that was allocated before backward."
        ),
        "closed_form_mib": Column(
            "naive saves, in closed form",
            "MiB",
            "What written-out attention must save for backward.",
        ),
        # ceilings
        "shape": Column(
            "rows x inner x columns", "", "Sides of the matrices that are multiplied.", write=str
        ),
        "flops_per_byte": Column(
            "intensity",
            "FLOP/byte",
            "FLOPs over the least bytes that must move.",
            3,
            write=three_digits,
        ),
        "tflops_per_s": Column("rate", "TFLOP/s", "FLOPs over the time.", derived=True),
        "data_sheet_share": Column(
            "of data sheet",
            "%",
            "Rate over what the data sheet promises.",
            1,
            scale=100,
            derived=True,
            write=three_digits,
        ),
        "best_share": Column(
            "of best",
            "%",
            "Rate over that of the best matrix multiplication at this precision.",
            1,
            scale=100,
            derived=True,
            write=three_digits,
        ),
        "stream": text_column("pass", "What passes over memory."),
        "launched": text_column(
            "what is launched", "A kernel, a copy or a call, and how it was launched."
        ),
        "median_us": Column(
            "time",
            "µs",
            "Median of the times, with their standard deviation.",
            std="std_us",
            doubt="is_doubted",
            instead="ended",
        ),
        "tensor_mib": Column("tensor", "MiB", "Size of the whole tensor that is exchanged."),
        "algorithm_gb_per_s": Column(
            "algorithm", "GB/s", "Bytes of the tensor over the time.", 1, derived=True
        ),
        "bus_gb_per_s": Column(
            "bus", "GB/s", "Bytes that each process of a ring sends, over the time.", derived=True
        ),
        "ceiling": text_column(
            "ceiling",
            "What is measured at its best; a product is a matrix multiplication in this precision.",
        ),
        "measured": Column(
            "measured", "", "The best that was measured.", std="measured_std", doubt="is_doubted"
        ),
        "data_sheet": Column("data sheet", "", "What the data sheet promises.", 2),
        "reached_at": text_column("reached at", "Size at which it was reached.", 3),
        # the study of fusion; times and rates of ceilings too
        "speed_up": Column(
            "speed-up",
            "vs eager",
            "How many times faster than the eager operation.",
            4,
            derived=True,
            write=three_digits,
        ),
        "op": text_column("op", "The operation."),
        "version": text_column(
            "version", "Written out, compiled, or PyTorch's own fused operation."
        ),
        "kernels": count_column("kernels", "Kernels that were launched.", 3),
        "must_move_mib": Column(
            "must move", "MiB", "Inputs read once and results written once.", 6
        ),
        "moved_mib": Column("moved", "MiB", "Bytes that were read and written."),
        "median_ms": Column(
            "time",
            "ms",
            "Median of the times, with their standard deviation.",
            std="std_ms",
            doubt="is_doubted",
            instead="ended",
        ),
        "gb_per_s": Column("rate", "GB/s", "Bytes over the time.", derived=True),
        "bandwidth_share": Column(
            "of bandwidth",
            "%",
            "Rate of the bytes that must move over the data sheet's bandwidth.",
            4,
            scale=100,
            derived=True,
            write=three_digits,
        ),
        "max_error": Column(
            "max error",
            "",
            "Largest distance from the same mathematics in float64.",
            8,
            write=scientific,
            instead="error_words",
        ),
    }
)
"""All columns by key, with the unit and the digits that most tables use; `column` adapts one for
a single table.
"""
