"""Each version of each operation on a CPU: bytes counted by hand, results of other libraries,
injected faults.
"""

import math
import re
import tempfile
import time
from dataclasses import replace

import numpy as np
import pytest
import scipy.special
import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils.flop_counter import FlopCounterMode

from cs336.config import Device, Phase, Precision
from cs336.record import Status
from cs336.studies.cell import attempt
from cs336.studies.fusion_cell import OPS, Watcher, measure_fusion
from cs336.studies.operators import FusionGrid, FusionRow, Op, Version, input_shapes, version_rows
from cs336.studies.records import Cell
from cs336.studies.runner import run_study

GRID = FusionGrid(
    device=Device.CPU,
    batch_size=2,
    context_length=3,
    width=8,
    num_heads=5,
    d_head=4,
    passes=3,
    warmup_passes=1,
)  # unequal on purpose
ROWS = 2 * 3
ELEMENTS = ROWS * 8
HEADS = 2 * 5 * 3 * 4
SCORES = 2 * 5 * 3 * 3

MUST_MOVE = {
    (Op.GELU, Phase.FORWARD): 2 * ELEMENTS,
    (Op.GELU, Phase.BACKWARD): 3 * ELEMENTS,
    (Op.SOFTMAX, Phase.FORWARD): 2 * ELEMENTS,
    (Op.SOFTMAX, Phase.BACKWARD): 3 * ELEMENTS,
    (Op.RMS_NORM, Phase.FORWARD): 2 * ELEMENTS + 8,
    (Op.RMS_NORM, Phase.BACKWARD): 3 * ELEMENTS + 2 * 8,
    (Op.ATTENTION, Phase.FORWARD): 4 * HEADS,
    (Op.ATTENTION, Phase.BACKWARD): 7 * HEADS,
}
WRITTEN_OUT_MOVES = {
    # x**3, its factor, x +, the factor, tanh, 1 +, 0.5 x: each a read and a write, one of them two
    # reads; the product
    Op.GELU: (8, 18 * ELEMENTS),
    # maximum n + r, difference 2 n + r, exponential 2 n, sum n + r, quotient 2 n + r
    Op.SOFTMAX: (5, 8 * ELEMENTS + 4 * ROWS),
    # square 2 n, mean n + r, + eps 2 r, rsqrt 2 r, product 2 n + r, gain 2 n + width
    Op.RMS_NORM: (6, 7 * ELEMENTS + 6 * ROWS + 8),
    # scaling 2 m, scores 2 m + s, softmax 2 s, values s + 2 m
    Op.ATTENTION: (4, 6 * HEADS + 4 * SCORES),
}


def inputs_of(op: Op, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(shape, generator=generator, dtype=dtype, requires_grad=True)
        for shape in input_shapes(GRID, op)
    ]


def expected_of(op: Op, inputs: list[torch.Tensor]) -> np.ndarray:
    x, *others = (tensor.detach().numpy() for tensor in inputs)
    if op is Op.GELU:
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * np.power(x, 3))))
    if op is Op.SOFTMAX:
        return scipy.special.softmax(x, axis=-1)
    if op is Op.RMS_NORM:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-5) * others[0]
    weights = scipy.special.softmax(
        np.einsum("bhqd,bhkd->bhqk", x, others[0]) / math.sqrt(4), axis=-1
    )
    return np.einsum("bhqk,bhkd->bhqd", weights, others[1])


@pytest.mark.parametrize("op", Op)
def test_both_forms_compute_what_the_definition_says(op: Op) -> None:
    inputs = inputs_of(op, torch.float64)
    for function in OPS[op]:
        np.testing.assert_allclose(
            function(*inputs).detach().numpy(), expected_of(op, inputs), rtol=1e-12, atol=1e-14
        )


@pytest.mark.parametrize(("op", "phase"), MUST_MOVE)
def test_bytes_that_must_move_are_those_counted_by_hand(op: Op, phase: Phase) -> None:
    (row,) = [
        row for row in version_rows(GRID, op, Precision.BF16, Version.EAGER) if row.phase is phase
    ]
    assert row.must_move_bytes == 2 * MUST_MOVE[op, phase]


@pytest.mark.parametrize("op", Op)
def test_bytes_that_the_written_out_form_moves_are_those_counted_by_hand(op: Op) -> None:
    inputs = inputs_of(op)
    with Watcher() as watcher:
        OPS[op][0](*inputs)
    assert (len(watcher.operations), watcher.num_bytes) == (
        WRITTEN_OUT_MOVES[op][0],
        4 * WRITTEN_OUT_MOVES[op][1],
    )


@pytest.mark.parametrize("op", [Op.GELU, Op.SOFTMAX])
def test_one_fused_operation_moves_what_must_move(op: Op) -> None:
    inputs = inputs_of(op)
    with Watcher() as forward:
        output = OPS[op][1](*inputs)
    upstream = torch.ones_like(output)
    with Watcher() as backward:
        torch.autograd.grad(output, inputs, upstream)
    for phase, watcher in ((Phase.FORWARD, forward), (Phase.BACKWARD, backward)):
        assert len(watcher.operations) == 1
        assert watcher.num_bytes == 4 * MUST_MOVE[op, phase]


@pytest.mark.parametrize("op", Op)
def test_flops_are_those_that_torch_counts(op: Op) -> None:
    inputs = inputs_of(op)
    with FlopCounterMode(display=False) as forward:
        output = OPS[op][0](*inputs)
    with FlopCounterMode(display=False) as backward:
        torch.autograd.grad(output, inputs, torch.ones_like(output))
    rows = version_rows(GRID, op, Precision.FP32, Version.EAGER)
    assert [row.matmul_flops for row in rows] == [
        forward.get_total_flops(),
        backward.get_total_flops(),
    ]


@pytest.mark.skipif(
    re.search(r"[^\w./+-]", tempfile.gettempdir()) is not None,
    reason=(
        "PyTorch's compiler calls the compiler of C++ with the path of TMPDIR as it is, which "
        "has an odd character"
    ),
)
def test_a_whole_study_on_a_cpu() -> None:
    said: list[tuple[str, int, int]] = []
    grid = replace(GRID, ops=(Op.SOFTMAX,), precisions=(Precision.FP32,))
    study = run_study(grid, lambda *words: said.append(words))
    assert [(done, total) for _, done, total in said] == [(0, 0), *((done, 3) for done in range(3))]
    assert [(row.version, row.phase) for row in study.rows] == [
        (version, phase) for version in Version for phase in (Phase.FORWARD, Phase.BACKWARD)
    ]
    for row in study.rows:
        assert row.failure is None
        assert len(row.measurement.times_s) == 3
        assert 0 <= row.max_error < 1e-5
        assert row.must_move_bytes == 4 * MUST_MOVE[row.op, row.phase]
        assert (row.moved_bytes is None) == (row.version is Version.COMPILED)
    kernels = {row.version: row.kernels for row in study.rows if row.phase is Phase.FORWARD}
    assert len(kernels[Version.EAGER]) == 5
    assert ["softmax" in name for name in kernels[Version.FUSED]] == [True]
    assert kernels[Version.COMPILED] == (), "on a CPU they are not known"


def measure_fused(function, op: Op = Op.GELU) -> dict[Phase, FusionRow]:
    """The rows of the operation's fused version, by the function in place of PyTorch's."""
    cell = Cell(label="a label", rows=version_rows(GRID, op, Precision.FP32, Version.FUSED))
    rows, _ = attempt(GRID, cell, lambda grid, rows: measure_fusion(grid, rows, function))
    return {row.phase: row for row in rows}


def test_an_injected_sleep_is_found_in_forward_alone() -> None:
    def slow(x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return F.gelu(x, approximate="tanh")

    rows = measure_fused(slow)
    assert rows[Phase.FORWARD].measurement.min_s >= 0.02
    assert rows[Phase.BACKWARD].measurement.min_s < 0.01


def test_an_injected_error_is_measured() -> None:
    rows = measure_fused(lambda x: F.gelu(x, approximate="tanh") + 0.25)
    assert rows[Phase.FORWARD].max_error == pytest.approx(0.25, rel=1e-5)
    assert rows[Phase.BACKWARD].max_error < 1e-6  # a constant has no gradient
    rows = measure_fused(lambda x: 3 * F.gelu(x, approximate="tanh"))
    assert rows[Phase.BACKWARD].max_error > 0.1
    rows = measure_fused(lambda x: F.gelu(x, approximate="tanh") * math.nan)
    assert [row.max_error for row in rows.values()] == [None, None]
    assert rows[Phase.FORWARD].status is Status.OK


def test_one_wrong_gradient_among_good_ones_is_seen() -> None:
    def hurt_the_values(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        v.register_hook(lambda gradient: gradient * math.nan)
        return F.scaled_dot_product_attention(q, k, v * 1)

    rows = measure_fused(hurt_the_values, Op.ATTENTION)
    assert rows[Phase.FORWARD].max_error < 1e-6
    assert rows[Phase.BACKWARD].max_error is None
