"""The table of operators by shape, beside what the device can do."""

from collections.abc import Iterable
from dataclasses import dataclass

from ....analysis.kernels.step_profile import OperatorTimes, StepProfile
from ....config import Precision
from ....costs.curves import Curves
from ....costs.hardware import DeviceSpec, find_device
from ....costs.kernels import ProductPrecision, padded
from ....costs.tape import MATMULS_OF, Form
from ....studies.ceilings_files import NO_CEILINGS_HERE
from ...columns import Column, Row, column
from ...section import Section, make_table
from ...words import percent, ratio, rounded, scaled
from .sums import terms

MAX_OPERATORS = 15
"""Rows of the table; the CSV has all."""
NOT_SEEN = "not seen"
_PRECISIONS = {
    "float": Precision.FP32,
    "c10::BFloat16": Precision.BF16,
    "c10::Half": Precision.FP16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """What one device can do: the best of its measured rates, else those of its data sheet."""

    spec: DeviceSpec | None
    curves: Curves | None
    fp8_flops_per_s: float | None = None
    """The best measured rate of matmuls in fp8."""

    @property
    def bytes_per_s(self) -> float | None:
        """The rate of memory: that of the largest copy, which no cache holds."""
        if self.curves is not None and self.curves.copies:
            largest = max(self.curves.copies)
            return largest / self.curves.copies[largest]
        return None if self.spec is None else self.spec.memory_bandwidth_bytes_per_s

    def flops_per_s(self, precision: Precision) -> float | None:
        """The rate of matmuls at this precision."""
        measured = () if self.curves is None else self.curves.matmuls.get(precision, ())
        rates = [matmul.flops_per_s for matmul in measured if matmul.form not in MATMULS_OF]
        if rates:
            return max(rates)
        return None if self.spec is None else self.spec.peak_flops_per_s.get(precision)

    def attention_flops_per_s(self, form: Form, d_head: int) -> float | None:
        """The best rate of fused attention in half precision with heads of this width, whose mask
        leaves half of the FLOPs; None if none was measured.
        """
        measured = () if self.curves is None else self.curves.matmuls.get(Precision.BF16, ())
        rates = []
        for kernel in measured:
            if kernel.form is form and padded(kernel.inner) == padded(d_head):
                rates.append(MATMULS_OF[form] * kernel.multiplications / kernel.time_s)
        return max(rates, default=None)

    def of_operator(self, part: OperatorTimes) -> float | None:
        """The rate of the operator's matmuls, of which fp32 may use tensor cores (TF32): a rate
        above that without them shows it.
        """
        precision = _PRECISIONS.get(part.type)
        if precision is None:
            return None
        rate = self.flops_per_s(precision)
        is_above = rate is not None and (part.flops or 0) > rate * part.total_s
        if precision is Precision.FP32 and is_above:
            return self.flops_per_s(Precision.TF32)
        return rate


def ceiling_of(profile: StepProfile) -> Ceiling:
    """The ceiling of the profile's device; an unknown one where it names none, or several."""
    if len(profile.device_names) != 1:
        return Ceiling(spec=None, curves=None)
    name = profile.device_names[0]
    return Ceiling(
        spec=find_device(name),
        curves=NO_CEILINGS_HERE.curves(name),
        fp8_flops_per_s=NO_CEILINGS_HERE.flops_per_s(name, ProductPrecision.FP8),
    )


def limit_s(part: OperatorTimes, ceiling: Ceiling) -> float | None:
    """The least time of the operator's calls at the rates of matmuls and of memory; None if one of
    the rates that it needs, or what it does, is not known.
    """
    memory, least = ceiling.bytes_per_s, []
    if part.bytes is not None and memory:
        least.append(part.bytes / memory)
    if part.flops is not None:
        rate = ceiling.of_operator(part)
        if not rate:
            return None
        least.append(part.flops / rate)
    return max(least, default=None)


def operators_section(profile: StepProfile) -> Section:
    """Operators by shape and phase: those that lose the most time to the device's limit first, then
    those without one.
    """
    if not any(part.shape for part in profile.operators):
        return Section(name="operators")
    ceiling = ceiling_of(profile)
    rows = [_operator_row(part, profile, ceiling) for part in profile.operators]
    rows.sort(key=lambda row: (row["lost_ms_per_step"] or 0.0, row["ms_per_step"]), reverse=True)
    columns = [
        Column(
            "operator", "", "The operator that launched the kernels.", key="operator", write=str
        ),
        Column("shape", "", "Sides of the tensors among its arguments.", key="shape", write=str),
        Column("type", "", "Type of the first tensor.", key="type", drop_order=2, write=str),
        column("phase", drop_order=1),
        Column("calls", "", "Calls per step.", key="calls_per_step", drop_order=3, write=rounded),
        Column("time", "ms", "Time per step.", key="ms_per_step", write=rounded),
        Column("lost", "ms", "Time beyond the limit.", key="lost_ms_per_step", write=rounded),
        Column("rate", "TFLOP/s", "Achieved rate.", key="tflops_per_s", write=rounded),
        Column("of at most", "TFLOP/s", "The limit.", key="limit_tflops_per_s", write=rounded),
        Column("memory", "GB/s", "Least bytes over time.", key="gb_per_s", write=rounded),
        Column("of at most ", "GB/s", "The limit.", key="limit_gb_per_s", write=rounded),
    ]
    table = make_table(
        "Operators by shape", columns, rows[:MAX_OPERATORS], _notes(profile, ceiling, rows)
    )
    return Section(name="operators", tables=(table,), rows=rows)


def _operator_row(part: OperatorTimes, profile: StepProfile, ceiling: Ceiling) -> Row:
    """The values of one operator, per step."""
    steps = profile.num_steps
    least_s = limit_s(part, ceiling)
    flops_per_s, bytes_per_s = ratio(part.flops, part.total_s), ratio(part.bytes, part.total_s)
    is_matmul = part.flops is not None
    return {
        "operator": part.name or NOT_SEEN,
        "shape": part.shape if part.name else NOT_SEEN,
        "type": _PRECISIONS.get(part.type, part.type),
        "phase": part.phase,
        "kernels_per_step": part.count / steps,
        "calls_per_step": part.calls / steps,
        "ms_per_step": part.total_s / steps * 1e3,
        "limit_ms_per_step": scaled(least_s, 1e3 / steps),
        "lost_ms_per_step": scaled(_lost_s(part, least_s), 1e3 / steps),
        "tflops_per_s": scaled(flops_per_s, 1e-12),
        "limit_tflops_per_s": scaled(ceiling.of_operator(part) if is_matmul else None, 1e-12),
        "gb_per_s": scaled(bytes_per_s, 1e-9),
        "limit_gb_per_s": scaled(ceiling.bytes_per_s if bytes_per_s else None, 1e-9),
    }


def _lost_s(part: OperatorTimes, least_s: float | None) -> float | None:
    """The time beyond the limit. None of it is lost where caches hold what memory would have to
    move.
    """
    return None if least_s is None else max(part.total_s - least_s, 0.0)


def _notes(profile: StepProfile, ceiling: Ceiling, rows: list[Row]) -> Iterable[str]:
    _, time = terms(profile)
    yield (
        f"{time} per step by the innermost operator of each launch. Bytes are the least: each "
        "argument and result once."
    )
    if ceiling.spec is None and ceiling.curves is None:
        yield "No limit of the device is known, so nothing is said to be lost."
    elif ceiling.curves is None:
        yield "Limits are those of the device's data sheet."
    else:
        yield "Limits are the best rates measured on such a device."
    if len(rows) > MAX_OPERATORS:
        shown = sum(row["ms_per_step"] for row in rows[:MAX_OPERATORS])
        part = percent(shown, sum(row["ms_per_step"] for row in rows))
        yield f"Shown are {MAX_OPERATORS} of {len(rows)} rows, {part} % of the time."
