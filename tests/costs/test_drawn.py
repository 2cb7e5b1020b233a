"""Traces of drawn models, against what a CPU keeps, what PyTorch's own autocast does, and closed
forms.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F  # noqa: N812

from cs336.config import Phase
from cs336.costs.tape import Category, Tape, phases_of
from cs336.costs.time import flops_of
from cs336.costs.tracing import tracing
from tests.drawn_models import Drawn, Shape, drawn

BATCH, LENGTH = 2, 32
SMALL = {"vocab_size": 96, "width": 64, "layers": 1, "heads": 4}


def loss_of(model: Drawn, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def alike(seed: int) -> Shape:
    """A drawn shape of which a CPU keeps what a GPU does: rms_norm with weights is no single
    kernel there.
    """
    shape = drawn(seed, **SMALL)
    is_fused = (
        shape.key_width == shape.value_width
        and shape.shared_by == 1
        and shape.attention != "normed"
    )
    attention = shape.attention if is_fused else "written"
    return replace(
        shape, attention=attention, norm="bare" if shape.norm == "weighted" else shape.norm
    )


def bytes_kept_on_cpu(shape: Shape) -> list[int]:
    model, tokens = Drawn(shape), torch.randint(shape.vocab_size, (BATCH, LENGTH))
    others = {part.untyped_storage().data_ptr() for part in (*model.parameters(), tokens)}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss_of(model, tokens)
    return sorted(
        tensor.untyped_storage().nbytes() for at, tensor in kept.items() if at not in others
    )


def tape_of(shape: Shape) -> Tape:
    with tracing({}) as trace:
        model, tokens = (
            Drawn(shape).to("cuda"),
            torch.zeros(BATCH, LENGTH, dtype=torch.int64, device="cuda"),
        )
        trace.routing.tokens = tokens.numel()
        trace.begin(Phase.FORWARD)
        loss = loss_of(model, tokens)
        trace.begin(Phase.BACKWARD)
        loss.backward()
        trace.begin(Phase.STEP)
        tape = trace.tape()
    tape.places = trace.places
    return tape


def bytes_kept_on_tape(tape: Tape) -> list[int]:
    """Tensors that forward has made and left, but for the loss itself."""
    (_, (begin, end), _), *_ = phases_of(tape, -1)
    freed = {~event for event in tape.events[begin:end] if event < 0}
    specs = [
        tape.spec(event) for event in tape.events[begin:end] if event >= 0 and event not in freed
    ]
    sizes = [spec.size_bytes for spec in specs if spec.category is not Category.LIBRARY_WORKSPACE]
    sizes.remove(4)
    return sorted(sizes)


@pytest.mark.parametrize("seed", range(24))
def test_forward_keeps_what_it_keeps_on_a_cpu(seed: int) -> None:
    """Of loops over experts the sum, as data do not choose evenly."""
    shape = alike(seed)
    on_cpu, on_tape = bytes_kept_on_cpu(shape), bytes_kept_on_tape(tape_of(shape))
    assert sum(on_cpu) == sum(on_tape)
    assert on_cpu == on_tape or shape.feed_forward == "looped"


OPERATIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "square": lambda x, *_: x.square(),
    "pow": lambda x, *_: x**2,
    "tanh": lambda x, *_: 15 * torch.tanh(x / 15),
    "sum": lambda x, *_: x.sum(1),
    "norm": lambda x, *_: x.norm(),
    "normalize": lambda x, *_: F.normalize(x),
    "rms_norm": lambda x, *_: F.rms_norm(x, (8,)),
    "softmax": lambda x, *_: x.softmax(-1),
    "log_softmax": lambda x, *_: F.log_softmax(x, -1),
    "as asked": lambda x, *_: x.softmax(-1, dtype=x.dtype),
    "cumsum": lambda x, *_: x.cumsum(0),
    "linear": lambda x, w, _: F.linear(x, w),
    "einsum": lambda x, w, _: torch.einsum("ij,kj", x, w),
    "addcmul": lambda x, w, _: torch.addcmul(x, x, w),
    "cross_entropy": lambda x, _, t: F.cross_entropy(x, t),
    "smooth": lambda x, _, t: F.cross_entropy(x, t, label_smoothing=0.1),
    "std": lambda x, *_: x.std(),
    "cosine": lambda x, w, _: F.cosine_similarity(x, w),
    "gelu": lambda x, *_: F.gelu(x),
    "mean": lambda x, *_: x.mean(),
    "cdist": lambda x, w, _: torch.cdist(x, w),
    "exp": lambda x, *_: x.exp(),
    "softplus": lambda x, *_: F.softplus(x),
}


def results(name: str, dtypes: tuple[torch.dtype, torch.dtype], low: torch.dtype) -> Any:
    x, w = (torch.empty(8, 8, device="cuda", dtype=dtype) for dtype in dtypes)
    targets = torch.empty(8, device="cuda", dtype=torch.int64)
    with torch.no_grad(), torch.autocast("cuda", low):
        out = OPERATIONS[name](x, w, targets)
        return tuple(out.shape), out.dtype


@pytest.mark.parametrize("name", OPERATIONS)
def test_types_under_autocast_are_those_of_pytorch(name: str) -> None:
    """PyTorch's own autocast runs on fake tensors, which it takes for CUDA's."""
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    for low in kinds[1:]:
        for dtypes in [(kinds[0], kinds[0]), (low, low), (low, kinds[0]), (kinds[0], low)]:
            with tracing({}):
                traced = results(name, dtypes, low)
            with (
                mock.patch(
                    "torch.cuda.amp.common.amp_definitely_not_available", return_value=False
                ),
                mock.patch("torch.cuda.is_bf16_supported", return_value=True),
                FakeTensorMode(),
            ):
                assert traced == results(name, dtypes, low), (dtypes, low)


@pytest.mark.parametrize("seed", range(8))
def test_experts_have_the_flops_and_parameters_of_the_tokens_that_choose_them(seed: int) -> None:
    """Three matmuls for each choice, and the router's."""
    choose = random.Random(seed).choice
    count = choose([2, 3, 7, 8])
    kind, top_k = choose(["grouped", "looped"]), choose([1, 2, count])
    shape = Shape(**SMALL, feed_forward=kind, experts=count, top_k=top_k, norm="bare")
    tape = tape_of(shape)
    _, _, (first, stop) = phases_of(tape, -1)[0]
    flops = sum(
        flops_of(tape.operations[tape.launches[place]])
        for place in range(first, stop)
        if (tape.places[place] or "").startswith("feed_forward")
    )
    tokens = BATCH * LENGTH
    rows = tokens * top_k if kind == "grouped" else count * round(tokens * top_k / count)
    assert flops == 2 * rows * 3 * shape.width**2 + 2 * tokens * shape.width * count
    assert tape.idle_parameters == round(3 * shape.width**2 * (count - rows / tokens))


NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "rms_norm": lambda x: F.rms_norm(x, (8,)),
    "weighted": lambda x: F.rms_norm(x, (8,), torch.ones(8, device=x.device)),
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "softmax": lambda x: x.softmax(-1),
    "gelu": F.gelu,
}


@pytest.mark.parametrize("name", NORMS)
def test_results_lie_in_memory_as_they_do_on_a_cpu(name: str) -> None:
    def strides(device: str) -> list[tuple[int, ...]]:
        x = torch.zeros(2, 4, 6, 8, device=device).transpose(1, 2).requires_grad_()
        y = NORMS[name](x)
        (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
        return [y.stride(), gradient.stride()]

    with tracing({}):
        traced = strides("cuda")
    assert traced == strides("cpu")
