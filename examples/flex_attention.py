"""Attention by PyTorch's flex_attention, which compiles a fused kernel: an example for `cs336
attention --own`.
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

_compiled = torch.compile(flex_attention, dynamic=False)


@cache
def _causal(num_tokens: int, device: torch.device) -> BlockMask:
    return create_block_mask(_sees, None, None, num_tokens, num_tokens, device=device)


def _sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """Attention of queries, keys and values (batch, seq, d_head), where each token may see those
    before it alone.
    """
    mask = _causal(q.shape[1], q.device) if is_causal else None
    return _compiled(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), block_mask=mask).squeeze(1)
