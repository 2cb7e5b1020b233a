"""Wraps the trained model in the way of parallelism that the configuration asks for."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cs336_systems.config import Mode, Parallel, Precision, RunConfig
from cs336_systems.model.fast.master_adamw import moments_type
from cs336_systems.model.fast.model import FastLM
from cs336_systems.model.optimizer import make_optimizer
from cs336_systems.model.trainable import Trainable
from cs336_systems.parallel.data_parallel import FlatDDP, Leaf, NaiveDDP, OverlapDDP, PushDDP
from cs336_systems.parallel.fully_sharded import FSDP
from cs336_systems.parallel.pytorch import TorchDDP, TorchFSDP
from cs336_systems.parallel.sharded_copies import CopyFSDP
from cs336_systems.parallel.sharded_optimizer import ShardedOptimizer
from cs336_systems.parallel.sharded_weights import ShardedMasterAdamW, leaves_of, with_received

Way = NaiveDDP | TorchDDP | FSDP | TorchFSDP


class LossModule(nn.Module):
    """A model and its loss as one module, so that a wrapper also sees where backward begins: at the loss."""

    def __init__(self, trainable: Trainable) -> None:
        super().__init__()
        self.model, self._loss = trainable.model, trainable.loss

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean loss of the batch."""
        return self._loss(tokens, targets)


def make_way(trainable: Trainable, config: RunConfig) -> Way:
    """Wrap the model and its loss; call the result like the loss. The process group must exist."""
    module = LossModule(trainable)
    model = _with_copies(trainable)
    if model and config.parallel.is_fsdp:
        way: Way = CopyFSDP(
            module, model, copies=config.parallel is Parallel.FSDP_PUSH, adds=not _optimizer_adds(config)
        )
    else:
        way = _wrap(module, config, leaves_of(model, shares=config.shard_optimizer) if model else None)
    for weight in model.weights if model else ():
        weight.refresh()  # the masters are now those of rank 0
    return way


def _wrap(module: nn.Module, config: RunConfig, leaves: Sequence[Leaf] | None) -> Way:
    match config.parallel:
        case Parallel.DDP_NAIVE:
            return NaiveDDP(module, leaves)
        case Parallel.DDP_FLAT:
            return FlatDDP(module, leaves)
        case Parallel.DDP_OVERLAP:
            return OverlapDDP(module, leaves)
        case Parallel.DDP_PUSH:
            return PushDDP(module, leaves, adds=leaves is None or not _optimizer_adds(config))
        case Parallel.DDP:
            return TorchDDP(module)
        case Parallel.FSDP | Parallel.FSDP_PUSH:
            return FSDP(module, _compute_dtype(config), copies=config.parallel is Parallel.FSDP_PUSH)
        case Parallel.FSDP2:
            return TorchFSDP(module, _compute_dtype(config))
    raise AssertionError(config.parallel)


def _optimizer_adds(config: RunConfig) -> bool:
    """Whether the fast model's optimizer adds up the gradients that ranks send each other: it does if there is one."""
    return config.mode is Mode.TRAIN


def _compute_dtype(config: RunConfig) -> torch.dtype | None:
    return torch.bfloat16 if config.precision is Precision.BF16 else None


def _with_copies(trainable: Trainable) -> FastLM | None:
    """The fast model, if it computes with copies of its weights."""
    model = trainable.model
    return model if isinstance(model, FastLM) and model.weights else None


def make_shared_optimizer(trainable: Trainable, config: RunConfig, way: Way) -> torch.optim.Optimizer:
    """The configuration's optimizer, sharded among the ranks if the configuration says so.

    `way` is the result of make_way.
    """
    model = _with_copies(trainable)
    pushes = way if isinstance(way, PushDDP) else None
    if not config.shard_optimizer:
        if model and pushes:
            model.weights = tuple(with_received(weight, pushes) for weight in model.weights)
        return trainable.make_optimizer()
    if model:
        return ShardedMasterAdamW(
            model, config.learning_rate, pushes, moments=moments_type(config), splits=config.split_masters
        )
    make = functools.partial(make_optimizer, config.optimizer)
    return ShardedOptimizer(trainable.model.parameters(), make, lr=config.learning_rate)
