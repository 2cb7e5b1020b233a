"""Kernels of a step, as cells of the study of ceilings: matmuls as forward and backward launch them, and passes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from cs336_systems.config import SIZES, Attention, Device, Precision, RunConfig
from cs336_systems.costs.tape import MATMULS_OF, Form, Kind, Pass
from cs336_systems.costs.time import is_fast_step, operations, prepare_forecasts
from cs336_systems.model.fast.choose import fastest
from cs336_systems.record import Count
from cs336_systems.studies.loops import TimedRow, Timing

MASK_SIDE = 512
"""Number of positions in masked passes, and width of the rows in softmax passes."""
HEADS, D_HEAD = 16, 64
"""Shape of the tensors in strided passes, which transpose heads and MASK_SIDE positions."""
PASS_BYTES = dict.fromkeys(Pass, 4 + 4) | {Pass.WIDEN: 2 + 4}
"""Bytes moved per element: bf16 read and fp32 written, or fp32 both."""
PASS_UNIT = HEADS * MASK_SIDE * D_HEAD
"""The elements of a pass are a multiple of this: one sequence of heads, or two masked matrices of scores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCell(TimedRow):
    """One matmul of a step, or one kernel of fused attention with the sides of its scores."""

    precision: Precision
    form: Form
    batch: Count
    """Number of matmuls in a batched one; for attention, heads of all sequences."""
    rows: Count
    inner: Count
    columns: Count
    timing: Timing

    @property
    def flops(self) -> int:
        """A multiply-add counts as 2; causal attention counts in full."""
        return MATMULS_OF.get(self.form, 1) * 2 * self.batch * self.rows * self.inner * self.columns

    @property
    def label(self) -> str:
        """The kind of kernel and its sides."""
        batch = f"{self.batch} x " if self.batch > 1 else ""
        return f"{self.precision} {self.form} {batch}{self.rows} x {self.inner} x {self.columns}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCell(TimedRow):
    """One pass over memory as a step makes them."""

    how: Pass
    moved_bytes: Count
    timing: Timing

    @property
    def elements(self) -> int:
        return self.moved_bytes // PASS_BYTES[self.how]


def kernel_cells(
    presets: Sequence[str], contexts: Sequence[int], precisions: Sequence[Precision], batch_size: int, timing: Timing
) -> Iterator[KernelCell]:
    """The matmuls and the attention kernels of training steps of these sizes, each once."""
    configs = {
        (precision, preset, context_length): _configs(preset, context_length, precision, batch_size)
        for precision in precisions
        for preset in presets
        for context_length in contexts
    }
    prepare_forecasts(chain.from_iterable(configs.values()))
    found = dict.fromkeys(
        (precision, each.form, each.batch, *each.sides)
        for (precision, _, _), alike in configs.items()
        for config in alike
        for of_phase in operations(config).values()
        for each in of_phase
        if each.kind in (Kind.MATMUL, Kind.ATTENTION)
    )
    for precision, form, batch, rows, inner, columns in found:
        yield KernelCell(
            precision=precision, form=form, batch=batch, rows=rows, inner=inner, columns=columns, timing=timing
        )  # fmt: skip


def _configs(preset: str, context_length: int, precision: Precision, batch_size: int) -> list[RunConfig]:
    """Steps of one block: eager with each attention, and in bf16 as `--fast` computes it."""
    model = replace(SIZES[preset], context_length=context_length, num_layers=1)
    eager = [
        RunConfig(
            size=preset, model=replace(model, attention=attention), precision=precision, batch_size=batch_size,
            device=Device.CUDA,
        )
        for attention in Attention
    ]  # fmt: skip
    fast = fastest(eager[0], None)
    return [*eager, fast] if is_fast_step(fast) and fast.precision is precision else eager


def pass_cells(device: Device, sizes: Sequence[int], timing: Timing) -> Iterator[PassCell]:
    """Passes that move about so many bytes, of all kinds but copies; on a CPU also copies into a new tensor."""
    for how in Pass:
        if how is Pass.COPY and device is not Device.CPU:  # where a step makes tensors in memory that it has already
            continue
        units = dict.fromkeys(max(1, size // (PASS_BYTES[how] * PASS_UNIT)) for size in sizes)
        for count in units:
            yield PassCell(how=how, moved_bytes=count * PASS_UNIT * PASS_BYTES[how], timing=timing)


def is_attention(form: Form) -> bool:
    """Whether it is a kernel of fused attention."""
    return form in MATMULS_OF
