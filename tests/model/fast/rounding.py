"""What rounding at random to bf16 must do, checked on many elements that are alike."""

import math

from torch import Tensor


def assert_rounded_at_random(values: Tensor, exact: float) -> None:
    """Each is one of the two neighbours of `exact` in bf16, and their mean is `exact`, to five standard deviations."""
    exponent = math.floor(math.log2(abs(exact)))
    step = 2.0 ** (exponent - 7)  # bf16 has 7 bits behind the leading one
    lower = math.floor(exact / step) * step
    share = exact / step - lower / step
    assert 0.05 < share < 0.95, "rounded to the nearest, this value would tell nothing"
    assert set(values.tolist()) == {lower, lower + step}
    deviation = step * math.sqrt(share * (1 - share) / values.numel())
    assert abs(values.double().mean().item() - exact) < 5 * deviation
