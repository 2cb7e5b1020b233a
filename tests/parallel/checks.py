"""What the ranks of these tests do, and the same in one process with the whole batch."""

import functools

import torch
import torch.distributed as dist
from torch import nn

from cs336_systems.config import Arch, ModelConfig
from cs336_systems.model.transformer import TransformerLM
from cs336_systems.parallel.data_parallel import FlatDDP, NaiveDDP, OverlapDDP, TorchDDP
from cs336_systems.parallel.fully_sharded import FSDP, TorchFSDP
from cs336_systems.parallel.sharded_optimizer import ShardedOptimizer

SHAPE = {"vocab_size": 37, "context_length": 8, "d_model": 24, "d_ff": 40, "num_layers": 3, "num_heads": 2}
STEPS, BATCH = 10, 6
"""A batch that 2 and 3 ranks can share."""
WAYS = {
    "ddp-naive": NaiveDDP,
    "ddp-flat": FlatDDP,
    "ddp-overlap": functools.partial(OverlapDDP, bucket_bytes=8000),
    "ddp": TorchDDP,
    "fsdp": FSDP,
    "fsdp2": TorchFSDP,
}
OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-3, eps=1e-4),
}


class WithSpareParameters(nn.Module):
    """The model of the course with a frozen matrix, a parameter that no loss depends on, and a buffer."""

    def __init__(self, model):
        super().__init__()
        self.inner = model
        self.frozen = nn.Linear(SHAPE["vocab_size"], SHAPE["vocab_size"]).requires_grad_(False)
        self.unused = nn.Linear(3, 5)
        self.register_buffer("scale", torch.rand(()) + 0.5)

    def forward(self, tokens):
        logits = self.inner(tokens)
        return logits + self.scale * self.frozen(logits)


def make_model(kind, seed, dtype):
    torch.manual_seed(seed)
    arch = Arch.GPT2 if kind == "gpt2" else Arch.CS336
    model = TransformerLM(ModelConfig(arch=arch, **SHAPE)).to(dtype)
    return WithSpareParameters(model).to(dtype) if kind == "spare" else model


def batches():
    generator = torch.Generator().manual_seed(7)
    size = (BATCH, SHAPE["context_length"] + 1)
    return [torch.randint(SHAPE["vocab_size"], size, generator=generator) for _ in range(STEPS)]


def loss_of(model, tokens):
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def weights_of(model):
    return {name: each.detach().clone() for name, each in model.named_parameters()}


def train_alone(kind, optimizer, dtype, seed=0):
    """The weights after training in one process with the whole batch."""
    model = make_model(kind, seed, dtype)
    opt = OPTIMIZERS[optimizer](model.parameters())
    for tokens in batches():
        loss_of(model, tokens).backward()
        opt.step()
        opt.zero_grad()
    return weights_of(model)


def train(way, kind, optimizer, dtype, shard=False):
    """The weights after training on this rank with its part of each batch; rank 0's seed is 0."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = make_model(kind, rank, dtype)
    wrapped = WAYS[way](model)
    make = OPTIMIZERS[optimizer]
    opt = ShardedOptimizer(wrapped.parameters(), make) if shard else make(wrapped.parameters())
    own = BATCH // ranks
    for tokens in batches():
        loss_of(wrapped, tokens[rank * own : (rank + 1) * own]).backward()
        wrapped.finish_gradient_synchronization()
        opt.step()
        opt.zero_grad()
    return wrapped.gather_full_parameters() if hasattr(wrapped, "gather_full_parameters") else weights_of(model)
