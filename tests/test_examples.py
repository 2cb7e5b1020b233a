"""The files of examples/, which help and README name."""

import pytest
import torch

from tests.own_kernels import right


@pytest.mark.parametrize("is_causal", [False, True])
def test_flex_attention_is_attention(is_causal: bool) -> None:
    from examples import flex_attention  # which imports the compiler

    q, k, v = torch.randn(3, 2, 256, 16, generator=torch.Generator().manual_seed(0))
    with torch.compiler.set_stance("force_eager"):
        found = flex_attention.attention(q, k, v, is_causal)
    torch.testing.assert_close(found, right(q, k, v, is_causal), rtol=1e-5, atol=1e-5)
