"""The ways to share a step among ranks, by name: this project's and PyTorch's."""

import contextlib
import functools
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..config import Mode, Parallel, Precision, RunConfig
from ..model.blocks import blocks_of
from ..model.fast.master_adamw import storage_of
from ..model.fast.model import FastLM
from ..model.optimizer import make_optimizer
from ..model.trainable import Trainable
from ..model.user_code import own_way
from .collectives import take_from_rank_0
from .data_parallel import FlatDDP, NaiveDDP, OverlapDDP, PushDDP, Wrapper
from .fast_sharded import CopyFSDP, ShardedMasterAdamW
from .fully_sharded import FSDP
from .packs import leaves_of, with_received
from .sharded_optimizer import ShardedOptimizer


class _TorchWay(Wrapper):
    """A wrapper of PyTorch's."""

    def finish_gradient_synchronization(self) -> None:
        """Nothing: the gradients are averaged when backward returns."""


class TorchDDP(_TorchWay):
    """PyTorch's DistributedDataParallel in buckets."""

    def __init__(self, module: nn.Module, micro_batches: int) -> None:
        """Wrap `module` in PyTorch's DistributedDataParallel, after all ranks got the parameters of
        rank 0.
        """
        super().__init__()
        # without broadcast_buffers, the wrapper does not send buffers at all
        take_from_rank_0(module)
        # static_graph: the same parameters have gradients in every step; it averages them in each
        # backward pass
        with warnings.catch_warnings():
            # PyTorch 2.13 has another name for broadcast_buffers
            warnings.simplefilter("ignore", FutureWarning)
            self.module = nn.parallel.DistributedDataParallel(
                module,
                broadcast_buffers=False,
                gradient_as_bucket_view=True,
                static_graph=micro_batches == 1,
            )

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:  # noqa: ANN401
        """Call the wrapped module; gradients are averaged in the last backward pass of a step."""
        assert isinstance(self.module, nn.parallel.DistributedDataParallel)
        with self.module.no_sync() if self.is_accumulating else contextlib.nullcontext():
            return self.module(*inputs, **named_inputs)


class TorchFSDP(_TorchWay):
    """PyTorch's fully_shard of each block and of the rest."""

    def __init__(self, module: nn.Module, compute_dtype: torch.dtype | None = None) -> None:
        """Shard the blocks of `module`, and then the rest, by PyTorch's fully_shard; parameters are
        gathered in `compute_dtype`, if it is given.
        """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        super().__init__()
        take_from_rank_0(module)
        device = next(module.parameters()).device
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        # the inputs of blocks keep their type: the residual stream is in fp32 under autocast
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, cast_forward_inputs=False)
        for block in blocks_of(module):
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(module, mesh=mesh, mp_policy=policy)
        self.module = module


Way = NaiveDDP | TorchDDP | FSDP | TorchFSDP


class LossModule(nn.Module):
    """A model and its loss as one module, so that a wrapper also sees where backward begins: at
    the loss.
    """

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
    compute_dtype = torch.bfloat16 if config.precision is Precision.BF16 else None
    leaves = leaves_of(model, shares=config.shard_optimizer) if model else None
    # in training the fast model's optimizer adds up the gradients of all ranks
    adds = model is None or config.mode is not Mode.TRAIN
    way: Way
    match config.parallel:
        case Parallel.DDP_NAIVE:
            way = NaiveDDP(module, leaves)
        case Parallel.DDP_FLAT:
            way = FlatDDP(module, leaves)
        case Parallel.DDP_OVERLAP:
            way = OverlapDDP(module, leaves, config.bucket_mib * 2**20)
        case Parallel.DDP_PUSH:
            way = PushDDP(module, leaves, adds=adds)
        case Parallel.FSDP | Parallel.FSDP_PUSH:
            copies = config.parallel is Parallel.FSDP_PUSH
            if model is None:
                way = FSDP(module, compute_dtype, copies=copies)
            else:
                way = CopyFSDP(module, model, copies=copies, adds=adds)
        case Parallel.DDP:
            way = TorchDDP(module, config.accumulate_steps)
        case Parallel.FSDP2:
            way = TorchFSDP(module, compute_dtype)
        case _:
            assert config.parallel is Parallel.OWN, config.parallel
            way = own_way(config.own_ddp or "", module, config.bucket_mib)
    for weight in model.weights if model else ():
        weight.refresh()  # the masters are now those of rank 0
    return way


def _with_copies(trainable: Trainable) -> FastLM | None:
    """The model as a FastLM, if it computes with low-precision copies of its weights; else None."""
    model = trainable.model
    return model if isinstance(model, FastLM) and model.weights else None


def make_shared_optimizer(
    trainable: Trainable, config: RunConfig, way: Way
) -> torch.optim.Optimizer:
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
        return ShardedMasterAdamW(model, config.learning_rate, pushes, storage_of(config))
    make = functools.partial(make_optimizer, config.optimizer)
    return ShardedOptimizer(trainable.model.parameters(), make, lr=config.learning_rate)
