"""Sums against NumPy's arithmetic, data types against the operations one by one and against a
model made for it.
"""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from cs336.config import Device, Precision
from cs336.studies.precision import (
    TOY_OUTPUTS,
    TRANSFORMER_OUTPUTS,
    ToyModel,
    accumulate,
    accumulation_study,
    dtype_study,
    normalise,
    observed_dtypes,
)
from cs336.studies.records import Accumulation

DTYPES = {Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}


def round_to_bf16(value: float) -> float:
    """Nearest bf16, ties to even, on the bits of the fp32 number: bf16 is its upper half."""
    bits = int(np.float32(value).view(np.uint32))
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return float(np.uint32(bits).view(np.float32))


ROUND: dict[str, Callable[[float], float]] = {
    "fp32": lambda value: float(np.float32(value)),
    "fp16": lambda value: float(np.float16(value)),
    "bf16": round_to_bf16,
}


@pytest.mark.parametrize(
    "row", accumulation_study(), ids=lambda row: f"{row.sum_dtype}+{row.addend_dtype}"
)
def test_sums_are_those_of_numpy(row: Accumulation) -> None:
    addend = ROUND[row.addend_dtype](0.01)
    totals = [0.0]
    for _ in range(1000):
        # fp64 has bits to spare: rounds once
        totals.append(ROUND[row.sum_dtype](totals[-1] + addend))
    assert row.total == totals[-1]
    assert row.stored_addend == addend
    assert row.growing_additions == sum(a != b for a, b in itertools.pairwise(totals))


FP16_LARGEST, FP16_SMALLEST = 65504, 2**-24


@pytest.mark.parametrize("scale", [2**-15, 2**-12, 2**-11, 0.5, 1.0, 16.0, 255.0, 256.0, 2048.0])
def test_the_variance_of_plus_and_minus_one_number_is_its_square(scale: float) -> None:
    """Powers of 2 square exactly in every type; fp16 ends at 65,504, and rounds half of its
    least number to 0.
    """
    exact = scale**2
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        norm = normalise(0.0, scale, dtype)
        assert norm.exact_variance == pytest.approx(exact, rel=1e-15)
        if dtype is torch.float16 and exact > FP16_LARGEST:
            assert (norm.variance, norm.output) == (None, 0), "a finite number over infinity"
        elif dtype is torch.float16 and exact <= FP16_SMALLEST / 2:
            assert norm.variance == 0
        else:
            assert norm.variance == pytest.approx(exact, rel=2**-8)
            assert norm.output == pytest.approx(scale / (exact + 1e-5) ** 0.5, rel=2**-6)
        assert norm.exact_output == pytest.approx(scale / (exact + 1e-5) ** 0.5, rel=1e-12)
        assert norm.library_output == pytest.approx(norm.exact_output, rel=2**-7), "in fp32 inside"


def test_error_is_what_storing_and_rounding_cost() -> None:
    exact = accumulate(torch.float32, torch.float16, addend=0.25, count=8)
    assert exact.exact == 2.0
    assert exact.error == exact.storage_error == exact.rounding_error == 0.0
    stored = accumulate(torch.float64, torch.float16, addend=0.1, count=3)
    assert stored.storage_error == pytest.approx(3 * (float(np.float16(0.1)) - 0.1))
    assert stored.rounding_error == pytest.approx(0, abs=1e-15)
    stuck = accumulate(torch.float16, torch.float16, addend=1.0, count=2100)
    # 11 bits: above 2048 fp16 holds even numbers only
    assert (stuck.total, stuck.growing_additions) == (2048.0, 2048)


@pytest.mark.parametrize("precision", DTYPES)
def test_toy_models_dtypes_are_those_of_its_operations_one_by_one(precision: Precision) -> None:
    model, x = ToyModel(6, 3), torch.randn(2, 6)
    with torch.autocast("cpu", dtype=DTYPES[precision]):
        hidden = F.linear(x, model.fc1.weight)
        normed = F.layer_norm(hidden.relu(), (10,), model.ln.weight, model.ln.bias)
        logits = F.linear(normed, model.fc2.weight)
        loss = F.cross_entropy(logits, torch.zeros(2, dtype=torch.long))
    gradient = torch.autograd.grad(loss, model.fc1.weight)[0]
    names = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
    assert observed_dtypes(model, x, precision, TOY_OUTPUTS) == {
        "parameters": "fp32",
        "first linear's output (fc1)": names[hidden.dtype],
        "layer norm's input": names[hidden.relu().dtype],
        "layer norm's output (ln)": names[normed.dtype],
        "logits": names[logits.dtype],
        "loss": names[loss.dtype],
        "gradients": names[gradient.dtype],
    }


class ScoresInDouble(nn.Module):
    """Attention whose softmax is fp64 on purpose, which no list of autocast's would tell."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.half = nn.Linear(4, 4, dtype=torch.float64)
        self.frozen = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16), requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        weights = torch.bmm(x, x.mT).double().softmax(-1)
        return torch.bmm(weights.bfloat16(), x)


def test_dtypes_are_observed_not_looked_up() -> None:
    seen = observed_dtypes(
        ScoresInDouble(), torch.zeros(2, 5, dtype=torch.long), Precision.BF16, {"x": "embedding"}
    )
    assert seen == {
        "parameters": "bf16, float64, fp32",
        "x": "fp32",
        "attention's scores": "bf16",
        "attention's softmax": "float64",
        "weights applied to the values": "bf16",
        "logits": "bf16",
        "loss": "fp32",
        "gradients": "fp32",
    }


def test_study_covers_every_model_and_quantity_on_the_cpu() -> None:
    rows = dtype_study([Device.CPU])
    assert {row.precision for row in rows} == set(DTYPES)
    for model in ("TransformerLM, cs336", "TransformerLM, gpt2"):
        for precision in DTYPES:
            seen = {
                row.quantity: row.dtype
                for row in rows
                if (row.model, row.precision) == (model, precision)
            }
            assert set(TRANSFORMER_OUTPUTS) < set(seen)
            assert seen["first linear's output (q_proj)"] == seen["attention's scores"] == precision
            assert seen["weights applied to the values"] == seen["logits"] == precision
            assert seen["parameters"] == seen["gradients"] == seen["loss"] == "fp32"
            assert seen["embedding's output"] == "fp32"


@pytest.mark.gpu
def test_softmax_and_residual_stream_of_the_transformer_stay_fp32_on_a_gpu() -> None:
    in_fp32 = ("attention's softmax", "residual stream after block 0", "loss", "parameters")
    in_half = ("attention's scores", "weights applied to the values", "logits")
    for row in dtype_study([Device.CUDA]):
        if row.quantity in (*in_fp32, "gradients"):
            assert row.dtype == "fp32", row
        if row.quantity in in_half:
            assert row.dtype == row.precision, row
