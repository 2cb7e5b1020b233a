"""Attention as users bring it, good and bad: `--own tests.own_kernels:right`."""

import math

import torch
from torch import Tensor


def right(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
    if is_causal:
        scores = scores + torch.full_like(scores, -math.inf).triu(1)
    return torch.exp(scores - scores.logsumexp(dim=-1, keepdim=True)) @ v


def writes_to_its_inputs(q, k, v, is_causal):
    output = right(q, k, v.clone(), is_causal)
    v.data.zero_()
    return output


def flash(*factors):
    """With the course's signature; the gradients are these times too large."""

    class Made(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, is_causal=False):
            ctx.save_for_backward(q, k, v)
            ctx.is_causal = is_causal
            return right(q, k, v, is_causal)

        @staticmethod
        def backward(ctx, upstream):
            with torch.enable_grad():
                inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
                gradients = torch.autograd.grad(right(*inputs, ctx.is_causal), inputs, upstream)
            return (
                *(factor * gradient for factor, gradient in zip(factors, gradients, strict=True)),
                None,
            )

    return Made


Flash, TwiceDk, NanDv = flash(1, 1, 1), flash(1, 2, 1), flash(1, 1, math.nan)


class RaisesBackward(Flash):
    @staticmethod
    def backward(ctx, upstream):
        raise RuntimeError("no backward yet")


class ForwardAlone(Flash):
    @staticmethod
    def backward(ctx, upstream):
        raise NotImplementedError("backward is next week's exercise")


class WrongForwardAlone(ForwardAlone):
    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        return right(q, k, v, False)


def without_the_mask(q, k, v, is_causal):
    return right(q, k, v, False)


def always_causal(q, k, v, is_causal):
    return right(q, k, v, True)


def without_the_scale(q, k, v, is_causal):
    return right(q * math.sqrt(q.shape[-1]), k, v, is_causal)


def products_in_tf32(q, k, v, is_causal):
    """Factors lose the 13 bits that tf32 does not have, and gradients pass as if they did not."""
    q, k, v = (
        x + (((x.view(torch.int32) + 2**12) & -(2**13)).view(torch.float32) - x).detach()
        for x in (q, k, v)
    )
    return right(q, k, v, is_causal)


def raises_at_16(q, k, v, is_causal):
    if q.shape[1] == 16:
        raise RuntimeError("context 16 is no whole block")
    return right(q, k, v, is_causal)


def out_of_memory(q, k, v, is_causal):
    return q * torch.empty(2**60)


def one_query_less(q, k, v, is_causal):
    return right(q, k, v, is_causal)[:, 1:]


def in_float64(q, k, v, is_causal):
    return right(q, k, v, is_causal).double()


def on_another_device(q, k, v, is_causal):
    return right(q, k, v, is_causal).to("meta")


def with_the_logsumexp(q, k, v, is_causal):
    return right(q, k, v, is_causal), q


def one_nan(q, k, v, is_causal):
    output = right(q, k, v, is_causal)
    return output.masked_fill(torch.arange(output.numel()).view_as(output) == 5, math.nan)
