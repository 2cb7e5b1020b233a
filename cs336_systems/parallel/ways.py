"""The way that a configuration shares its steps, put around the model that is trained."""

import functools

import torch
from torch import Tensor, nn

from cs336_systems.config import Parallel, Precision, RunConfig
from cs336_systems.model.optimizer import make_optimizer
from cs336_systems.model.trainable import Trainable
from cs336_systems.parallel.data_parallel import FlatDDP, NaiveDDP, OverlapDDP
from cs336_systems.parallel.fully_sharded import FSDP
from cs336_systems.parallel.pytorch import TorchDDP, TorchFSDP
from cs336_systems.parallel.sharded_optimizer import ShardedOptimizer

Way = NaiveDDP | TorchDDP | FSDP | TorchFSDP


class LossModule(nn.Module):
    """A model and its loss as one module, so that whatever surrounds the model also sees where its backward begins."""

    def __init__(self, trainable: Trainable) -> None:
        super().__init__()
        self.model, self._loss = trainable.model, trainable.loss

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean loss of the batch."""
        return self._loss(tokens, targets)


def make_way(trainable: Trainable, config: RunConfig) -> Way:
    """Wrap the model and its loss; call it like the loss. The process group must be there."""
    module = LossModule(trainable)
    compute_dtype = torch.bfloat16 if config.precision is Precision.BF16 else None
    match config.parallel:
        case Parallel.DDP_NAIVE:
            return NaiveDDP(module)
        case Parallel.DDP_FLAT:
            return FlatDDP(module)
        case Parallel.DDP_OVERLAP:
            return OverlapDDP(module)
        case Parallel.DDP:
            return TorchDDP(module)
        case Parallel.FSDP:
            return FSDP(module, compute_dtype)
        case Parallel.FSDP2:
            return TorchFSDP(module, compute_dtype)
    raise AssertionError(config.parallel)


def make_shared_optimizer(trainable: Trainable, config: RunConfig) -> torch.optim.Optimizer:
    """The configuration's optimizer, of which each rank has its share if the configuration says so."""
    if not config.shard_optimizer:
        return trainable.make_optimizer()
    make = functools.partial(make_optimizer, config.optimizer)
    return ShardedOptimizer(trainable.model.parameters(), make, lr=config.learning_rate)
