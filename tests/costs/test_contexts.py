"""What ranks that share a context pass over and exchange, as PyTorch's `context_parallel` does."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as contexts
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from cs336.costs.layout import Layout
from cs336.costs.layout_cost import LayoutCost, layout_cost
from cs336.costs.rank_operations import with_sums
from cs336.costs.tape import Form, Operation, OperationKind
from tests.costs.test_layout import CURVES, LINKS, run

SEQUENCE, HEADS, D_HEAD = 64, 2, 512
VIEWS = ("view", "slice", "split", "unsqueeze", "squeeze", "transpose", "detach", "alias", "expand")
"""Beginnings of names of operators that move nothing."""


class Moved(TorchDispatchMode):
    """Adds up the bytes that operators read and write: of each tensor once, and of in-place ones
    both.
    """

    def __init__(self) -> None:
        super().__init__()
        self.moved_bytes = 0
        self.collectives: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        name, namespace = function._opname, function.namespace
        if namespace != "aten":
            self.collectives[name] += 1
        elif not name.startswith((*VIEWS, "_unsafe_view", "empty", "lift_fresh")):
            read = {id(one): one for one in _tensors(args)}
            written = _tensors(result if isinstance(result, (tuple, list)) else [result])
            if name.startswith("zeros_like"):
                read = {}
            self.moved_bytes += sum(one.nbytes for one in (*read.values(), *written))
        return result


def _tensors(arguments: Any) -> list[Tensor]:
    """The tensors among arguments, in lists too."""
    tensors = []
    for one in arguments:
        if isinstance(one, Tensor):
            tensors.append(one)
        elif isinstance(one, (tuple, list)):
            tensors += _tensors(one)
    return tensors


def _made(length: int, width: int = D_HEAD, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor of (batch, heads, sequence, width) that lies in memory by tokens, as projections do
    that attention takes.
    """
    return torch.empty((1, length, HEADS, width), dtype=dtype, device="meta").transpose(1, 2)


def _attention(q: Tensor, k: Tensor, v: Tensor, **_: object) -> tuple[Tensor, ...]:
    """The results of a kernel, which are not counted."""
    with torch.utils._python_dispatch._disable_current_modes():
        length = q.shape[2]
        return _made(length), torch.empty((1, HEADS, length), device="meta")


def _backward(*, query: Tensor, key: Tensor, **_: object) -> tuple[Tensor, ...]:
    """The gradients that a kernel makes, which are not counted, and the copies that it makes of
    halves, whose tokens lie apart.
    """
    with torch.utils._python_dispatch._disable_current_modes():
        return _made(query.shape[2]), _made(key.shape[2]), _made(key.shape[2])


def _traced(rank: int, ranks: int) -> tuple[Moved, Moved]:
    """What a rank of PyTorch's ring does in forward and in backward."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        group = dist.group.WORLD
        q, k, v, out, grad = (_made(SEQUENCE) for _ in range(5))
        lse = torch.empty((1, HEADS, SEQUENCE), device="meta")
        with Moved() as forward:
            contexts._templated_ring_attention(group, 2, _attention, q, k, v, is_causal=True)
        with Moved() as backward:
            contexts._templated_ring_attention_backward(
                group, 2, _backward, grad, "grad_out", q, k, v, out, lse, is_causal=True
            )
        return forward, backward
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_gathered_contexts_are_added_up_by_pytorch_s_passes(ranks: int) -> None:
    """On average of the ranks, of which all together have as many steps of one kind as of the
    other.
    """
    traced = [_traced(rank, ranks) for rank in range(ranks)]
    elements = SEQUENCE * HEADS * D_HEAD
    for form, moved in zip(
        (Form.ATTENTION, Form.ATTENTION_BACKWARD), zip(*traced, strict=True), strict=True
    ):
        operation = Operation(
            kind=OperationKind.ATTENTION,
            form=form,
            sides=(SEQUENCE, D_HEAD, SEQUENCE),
            batch=HEADS,
            moved_bytes=4 * elements,
            element_bytes=2,
        )
        _, *passes = with_sums([operation], ranks, gathers=True)
        foretold = sum(one.launches * one.moved_bytes for one in passes)
        mean = sum(one.moved_bytes for one in moved) / ranks
        assert foretold == pytest.approx(mean, rel=0.005)


def test_pytorch_gathers_contexts_once_a_pass_and_sends_gradients_round() -> None:
    """Keys and values of all heads at once; their gradients in every step, the last included."""
    forward, backward = _traced(1, 4)
    assert forward.collectives["all_gather_into_tensor"] == 1
    assert backward.collectives["all_gather_into_tensor"] == 1
    assert forward.collectives["all_to_all_single"] == 0
    assert backward.collectives["all_to_all_single"] == 4


def test_gathered_contexts_wait_for_what_no_kernel_hides() -> None:
    """With links so slow that no kernel hides anything, forward waits for a gather of keys and
    values, 2 bytes of each of their elements and the same of other ranks, and backward for one more
    and for as many sends as there are ranks, of 4 bytes.
    """
    config = run("8B")
    slow = replace(LINKS, node_bytes_per_s=1e6, times={})
    layout = Layout(context=4, gathers_context=True)
    forecast = layout_cost(config, layout, CURVES, slow)
    assert isinstance(forecast, LayoutCost)
    elements = 2 * config.model.context_length // 4 * config.model.d_model
    sent_bytes = 2 * 3 * 2 * elements + 4 * 4 * elements
    blocks_s = config.model.num_layers * sent_bytes / slow.node_bytes_per_s
    assert forecast.time.exposed_s["context"] == pytest.approx(blocks_s, rel=0.01)
