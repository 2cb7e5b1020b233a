import math

import pytest
import torch

from cs336_systems.analysis.memory.formulas import FLOAT_BYTES, Formulas, Role, candidates, element_bytes
from cs336_systems.config import Arch, ModelConfig

XL_256, XL_512 = (
    ModelConfig(context_length=context, d_model=1600, d_ff=6400, num_layers=48, num_heads=25) for context in (256, 512)
)
ODD = ModelConfig(vocab_size=997, context_length=29, d_model=66, d_ff=130, num_layers=2, num_heads=3)
"""Sizes without common factors, so that nothing is ambiguous."""


def test_of_equal_sizes_the_role_decides() -> None:
    formulas = Formulas(XL_256, 4)
    logits, weight = "batch x T x vocabulary x 4: logits", "d_model x d_ff x 4: feed-forward weight"
    assert 4 * 256 * 10_000 * 4 == 1600 * 6400 * 4 == 40_960_000
    assert formulas.unsighted(40_960_000, Role.ACTIVATION, "", True) == logits
    assert formulas.unsighted(40_960_000, Role.WEIGHT, "", True) == weight
    assert formulas.unsighted(40_960_000, None, "", True) == f"{logits} or {weight}"


def test_of_equal_sizes_the_function_and_then_the_shape_decide() -> None:
    formulas = Formulas(XL_256, 4)
    scores, ffn = "batch x heads x T x T x 4: attention scores", "batch x T x d_ff x 4: feed-forward"
    size = 4 * 25 * 256 * 256 * 4
    assert size == 4 * 256 * 6400 * 4
    assert formulas.unsighted(size, Role.ACTIVATION, "forward", True) == f"{scores} or {ffn}"
    assert formulas.unsighted(size, Role.ACTIVATION, "silu", True) == ffn
    assert formulas.unsighted(size, Role.ACTIVATION, "softmax", True) == scores
    assert formulas.sighted(size, (1024, 6400), "float32", Role.ACTIVATION, "") == ffn
    assert formulas.sighted(size, (100, 256, 256), "float32", Role.ACTIVATION, "") == scores


@pytest.mark.parametrize("arch", Arch)
@pytest.mark.parametrize("batch_size", [1, 5])
def test_a_formula_multiplies_to_the_bytes(arch: Arch, batch_size: int) -> None:
    model = ModelConfig(**{name: getattr(ODD, name) for name in ("vocab_size", "context_length", "d_model", "d_ff",
                                                                  "num_layers", "num_heads")}, arch=arch)  # fmt: skip
    sizes = {"batch": batch_size, "heads": 3, "T": 29, "d_model": 66, "d_ff": 130, "vocabulary": 997, "d_head": 22}
    for candidate in candidates(model, batch_size):
        for size in FLOAT_BYTES:
            num_bytes = candidate.num_elements * size
            explained = Formulas(model, batch_size).unsighted(num_bytes, candidate.role, "", True)
            products = [option.split(":")[0].split(" x ") for option in explained.split(" or ")]
            assert all(math.prod(sizes.get(f) or int(f) for f in factors) == num_bytes for factors in products)
            assert candidate.formula(size).split(" x ") in products


@pytest.mark.parametrize("shape", [(66, 130), (130, 66), (1, 130, 66)])
def test_a_weight_may_be_transposed(shape: tuple[int, ...]) -> None:
    assert Formulas(ODD, 5).sighted(66 * 130 * 2, shape, "bfloat16", Role.WEIGHT, "") == (
        "d_model x d_ff x 2: feed-forward weight"
    )


def test_without_a_model_the_shape_is_the_formula() -> None:
    formulas = Formulas(None, None)
    assert (
        formulas.sighted(4 * 9 * 2, (4, 9), "float16", Role.ACTIVATION, "norm of block 3")
        == "4 x 9 x 2: norm of block 3"
    )
    assert formulas.sighted(1000, (4, 9), "float16", Role.ACTIVATION, "") == ""
    assert formulas.sighted(4, (), "float32", Role.WEIGHT, "") == ""
    assert formulas.unsighted(40_960_000, None, "", True) == ""


@pytest.mark.parametrize(
    "dtype", ["float32", "float64", "bfloat16", "float16", "int64", "uint8", "bool", "complex64", "float8_e4m3fn"]
)
def test_element_sizes_are_those_of_torch(dtype: str) -> None:
    assert element_bytes(dtype) == getattr(torch, dtype).itemsize
