"""The gradient of an embedding, written in Triton: a program adds BLOCK elements of one token's gradient to its row."""

# ruff: noqa: ANN001, ANN202, N803  (Triton reads the annotations of a kernel as its own)

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 512
"""Elements of one program; each thread has 4, which are 16 bytes of fp32."""
NUM_WARPS = 4


def add_rows(result: Tensor, tokens: Tensor, gradient: Tensor) -> None:
    """Add the gradient of each token, in no fixed order, to the row of `result` that the token names."""
    gradient, tokens = gradient.contiguous(), tokens.contiguous()
    width = gradient.shape[-1]
    grid = (tokens.numel(), triton.cdiv(width, BLOCK))
    _lookup_grads[grid](result, tokens, gradient, width, BLOCK=BLOCK, num_warps=NUM_WARPS)


@triton.jit  # type: ignore[untyped-decorator]
def _lookup_grads(result, tokens, gradient, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    position = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    row = tl.load(tokens + position).to(tl.int64)
    own = tl.load(gradient + position * width + column, mask=inside, other=0.0)
    tl.atomic_add(result + row * width + column, own, mask=inside, sem="relaxed")
