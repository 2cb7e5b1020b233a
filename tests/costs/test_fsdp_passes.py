"""Passes of PyTorch's FSDP beside its collectives, as its code runs them without other ranks."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from cs336.costs.layout import FSDP_PASSES

WIDTH, LAYERS, RANKS = 64, 3, 4


class Passes(TorchDispatchMode):
    """The bytes that operators read and write, by their names; `moved` says of which tensors of a
    call.
    """

    def __init__(self, moved: Callable[[Any, tuple[Any, ...], Any, Any], list[Tensor]]) -> None:
        super().__init__()
        self.moved_bytes: Counter[str] = Counter()
        self._moved = moved

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in self._moved(function, args, (kwargs or {}).get("out"), result):
            self.moved_bytes[function._opname] += tensor.nbytes
        return result


def listed(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


def of_fsdp(function: Any, args: tuple[Any, ...], out: Any, _: Any) -> list[Tensor]:
    """Whole parameters and gradients that FSDP's own operators move."""
    is_pass = function._opname in ("split_with_sizes_copy", "chunk_cat")
    if function.namespace != "fsdp" or not is_pass:
        return []
    return [*listed(args[0]), *listed(out)]


def of_gradients(function: Any, args: tuple[Any, ...], _: Any, result: Any) -> list[Tensor]:
    """The whole gradients of two layers, in one tensor, and what it is made of."""
    is_pass = function._opname in ("cat", "_to_copy", "div_")
    if not is_pass or result.shape != (2 * WIDTH * WIDTH,):
        return []
    return [*listed(args[0]), result]


def test_fully_shard_copies_what_it_gathers_and_what_it_reduces() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        mesh = dist.init_device_mesh("cpu", (RANKS,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        for layer in model:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        with Passes(of_fsdp) as passes:
            model(torch.randn(2, WIDTH)).sum().backward()
    finally:
        dist.destroy_process_group()
    elements = LAYERS * WIDTH * WIDTH
    assert passes.moved_bytes == {
        "split_with_sizes_copy": (4 + 4) * elements,
        "chunk_cat": 6 * elements,
    }
    assert sum(passes.moved_bytes.values()) == sum(FSDP_PASSES["fully_shard"]) * elements


def test_the_older_class_joins_casts_and_divides_gradients() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        layers = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        model = FullyShardedDataParallel(
            nn.Sequential(*layers),
            mixed_precision=policy,
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
        loss = model(torch.randn(2, WIDTH)).sum()
        with Passes(of_gradients) as passes:
            loss.backward()
    finally:
        dist.destroy_process_group()
    elements = 2 * WIDTH * WIDTH
    assert passes.moved_bytes == {
        "cat": 4 * elements,
        "_to_copy": 6 * elements,
        "div_": 8 * elements,
    }
    of_parameter = sum(FSDP_PASSES["FullyShardedDataParallel"])
    assert sum(passes.moved_bytes.values()) == of_parameter * elements
