"""Which kernels ceilings measure: no side of what people train is far from one of them, and none
takes long.
"""

import random
from collections import Counter
from math import inf, log2

import pytest

from cs336.config import Precision
from cs336.costs.kernels import ProductPrecision
from cs336.costs.tape import Form
from cs336.studies.ceilings_design import (
    MOST_ELEMENTS,
    MOST_MULTIPLICATIONS,
    attention_shapes,
    drawn_matmuls,
)

COUNT = 20
LINEAR = Form.FORWARD, Form.INPUT, Form.WEIGHT


@pytest.mark.parametrize("precision", MOST_MULTIPLICATIONS)
def test_each_form_has_its_count_of_different_matmuls_none_of_which_is_too_large(
    precision: Precision,
) -> None:
    shapes = list(drawn_matmuls(precision, COUNT))
    assert len(set(shapes)) == len(shapes)
    wanted = dict.fromkeys(LINEAR, COUNT)
    if precision is ProductPrecision.FP8:  # one layout, with fast sums and with full ones
        wanted = dict.fromkeys((Form.FORWARD, Form.INPUT), COUNT // 2)
    assert Counter(shape.form for shape in shapes if shape.batch == 1) == wanted
    for shape in shapes:
        assert shape.multiplications <= MOST_MULTIPLICATIONS[precision]
        assert shape.largest_matrix <= MOST_ELEMENTS


@pytest.mark.parametrize("form", LINEAR)
def test_matmuls_of_training_are_within_a_factor_of_8_of_a_measured_one(form: Form) -> None:
    """Nine of ten with 1k to 32k tokens and widths of 512 to 16k, in each side."""
    chance = random.Random(0)
    shapes = [shape for shape in drawn_matmuls(Precision.BF16, COUNT) if shape.form is form]
    far = 0
    for _ in range(200):
        tokens, inputs, outputs = (
            2 ** chance.uniform(10, 15),
            *(2 ** chance.uniform(9, 14) for _ in range(2)),
        )
        sides = {
            Form.FORWARD: (tokens, inputs, outputs),
            Form.INPUT: (tokens, outputs, inputs),
            Form.WEIGHT: (outputs, tokens, inputs),
        }[form]
        octaves = inf
        for shape in shapes:
            pairs = zip(sides, (shape.rows, shape.inner, shape.columns), strict=True)
            octaves = min(octaves, max(abs(log2(side / other)) for side, other in pairs))
        far += octaves > 3
    assert far <= 20


def test_attention_is_measured_forward_and_backward_at_each_context_that_is_quick() -> None:
    shapes = list(attention_shapes(Precision.BF16, (256, 65536)))
    assert {shape.rows for shape in shapes} >= {256, 65536}
    assert Counter(shape.form for shape in shapes) == {
        form: len(shapes) // 2 for form in (Form.ATTENTION, Form.ATTENTION_BACKWARD)
    }
    assert all(shape.batch % shape.queries_per_key == 0 for shape in shapes)
    slow = list(attention_shapes(Precision.FP32, (256, 65536)))
    assert {shape.rows for shape in slow} == {256}
