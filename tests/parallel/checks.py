"""What the ranks of these tests do, and the same in one process with the whole batch."""

import functools
from collections import Counter
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from cs336.analysis.memory.notes import notes_path, read_notes
from cs336.config import Arch, ModelConfig
from cs336.measure.clock import HostClock, ObservedClock
from cs336.measure.memory import MemoryRecorder
from cs336.measure.step import TrainingStep
from cs336.model.transformer import TransformerLM
from cs336.parallel.collectives import TrafficCounter
from cs336.parallel.data_parallel import FlatDDP, NaiveDDP, OverlapDDP, PushDDP
from cs336.parallel.fully_sharded import FSDP
from cs336.parallel.sharded_optimizer import ShardedOptimizer
from cs336.parallel.ways import TorchDDP, TorchFSDP
from tests.measure.allocator import make_up_allocator
from tests.parallel.fast import config_of, of_all_ranks, sent_by

SHAPE = {
    "vocab_size": 37,
    "context_length": 8,
    "d_model": 24,
    "d_ff": 40,
    "num_layers": 3,
    "num_heads": 2,
}
STEPS, BATCHES, BATCH = 3, 4, 6
"""The first step learns the order, the second sends in it, the third begins with what it left. 2
or 3 share a batch.
"""
WAYS = {
    "ddp-naive": NaiveDDP,
    "ddp-flat": FlatDDP,
    "ddp-overlap": functools.partial(OverlapDDP, bucket_bytes=8000),
    "ddp-push": PushDDP,
    "ddp": functools.partial(TorchDDP, micro_batches=1),
    "fsdp": FSDP,
    "fsdp-push": functools.partial(FSDP, copies=True),
    "fsdp2": TorchFSDP,
}
OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-3, eps=1e-4),
}

NOTED = "token_embeddings", "layers.1.ln1", "layers.1.attn.q_proj", "lm_head"
"""Modules whose weights in forward are noted."""


NOTED = "token_embeddings", "layers.1.ln1", "layers.1.attn.q_proj", "lm_head"
"""Modules whose weights in forward are noted."""


class WithSpareParameters(nn.Module):
    """The model of the course with a frozen matrix, a parameter that no loss depends on, and a
    buffer.
    """

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
    return [torch.randint(SHAPE["vocab_size"], size, generator=generator) for _ in range(BATCHES)]


def device():
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def loss_of(model, tokens):
    tokens = tokens.to(next(model.parameters()).device)
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def weights_of(model):
    """All parameters whole; PyTorch's FSDP has parts of them, which it gathers."""
    weights = {}
    for name, parameter in model.named_parameters():
        weight = parameter.detach()
        weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        weights[name] = weight.cpu().clone()
    return weights


class Trained(NamedTuple):
    """What training gives: the weights whole, and of the last step the loss and the types of
    gradients and weights.
    """

    weights: dict[str, torch.Tensor]
    loss: float
    gradients: set[torch.dtype]
    in_forward: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    """By module, type and shape of its weight in forward."""


def train(
    way,
    kind,
    optimizer="sgd",
    dtype=torch.float32,
    *,
    shard=False,
    compiled=False,
    in_bf16=False,
    backwards=1,
):
    """Train on this rank with its part of each batch, or without a way on rank 0 with the whole
    batches. Its seed is 0.

    If `compiled`, each block is, in one graph for all blocks and steps. `backwards` is the number
    of batches of a step.
    """
    if way is None and dist.get_rank():
        return None
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if way else (0, 1)
    model = make_model(kind, rank, dtype).to(device())
    if compiled:
        torch._dynamo.reset()
        torch._dynamo.config.error_on_recompile = True
        for block in model.layers:
            block.compile(backend="aot_eager_default_partitioner", fullgraph=True)
    low = [torch.bfloat16] if in_bf16 else []
    wrapped = WAYS[way](model, *low) if way else model
    seen = {}

    def note(name, module, _inputs):
        seen[name] = (module.weight.dtype, tuple(module.weight.shape))

    for name in NOTED if in_bf16 else ():
        model.get_submodule(name).register_forward_pre_hook(functools.partial(note, name))
    make = OPTIMIZERS[optimizer]
    opt = ShardedOptimizer(wrapped.parameters(), make) if shard else make(wrapped.parameters())
    share = BATCH // ranks
    for number, tokens in enumerate(batches()[: STEPS * backwards], start=1):
        with torch.autocast(device(), *low, enabled=in_bf16):
            loss = loss_of(wrapped, tokens[rank * share : (rank + 1) * share])
        loss.backward()
        if number % backwards:
            continue
        if way:
            wrapped.finish_gradient_synchronization()
        gradients = {
            parameter.grad.dtype for parameter in wrapped.parameters() if parameter.grad is not None
        }
        opt.step()
        opt.zero_grad()
    weights = whole_parameters(wrapped) if isinstance(wrapped, FSDP) else weights_of(model)
    return Trained(weights, loss.item(), gradients, seen)


def whole_parameters(wrapped):
    """The parameters that the ranks have in parts, by their names in the module."""
    whole = {}
    for sharded in chain.from_iterable(flat.parameters for flat in wrapped._flats):
        elements = of_all_ranks(sharded.shard)[: sharded.full.numel()]
        whole[sharded.shard] = elements.view(sharded.full.shape)
    named = wrapped.module.named_parameters(remove_duplicate=False)
    return {name: whole.get(part, part).detach().clone().cpu() for name, part in named}


def traffic_of(way, kind):
    """What one step sends in backward and after it, once the way is in its steady state."""
    wrapped, tokens = WAYS[way](make_model(kind, 0, torch.float32)), batches()[0][:2]
    # PyTorch's DDP sends how it splits the gradients in its third
    for _ in range(3 if way == "ddp" else 2):
        loss_of(wrapped, tokens).backward()
        wrapped.finish_gradient_synchronization()
        wrapped.zero_grad()
    with TrafficCounter() as of_forward:
        loss = loss_of(wrapped, tokens)
    with TrafficCounter() as of_backward:
        loss.backward()
    with TrafficCounter() as of_rest:
        wrapped.finish_gradient_synchronization()
    return [sent_by(counter.traffic()) for counter in (of_forward, of_backward, of_rest)]


def shards():
    """Of a model under FSDP: elements of its parameters, bytes of what is gathered by place, and
    names of shards.
    """
    model = make_model("cs336", 0, torch.float32)
    wrapped = FSDP(model)
    gathered = []

    def note(*_):
        gathered.append(sum(flat.gathered.untyped_storage().nbytes() for flat in wrapped._flats))

    for block in model.layers:
        block.attn.register_forward_pre_hook(note)
    between = []
    for tokens in batches()[:3]:
        loss_of(wrapped, tokens[:2]).backward()
        wrapped.finish_gradient_synchronization()
        note()
        between.append(gathered.pop())
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    gradients = {name: tuple(parameter.grad.shape) for name, parameter in model.named_parameters()}
    return shapes, gradients, between, gathered


def shared_states():
    """Elements of the optimizer's state on this rank, the groups' learning rates, and the
    weights.
    """
    torch.manual_seed(0)
    model = make_model("gpt2", 0, torch.float32)
    named = list(model.named_parameters())
    opt = ShardedOptimizer(
        [parameter for _, parameter in named[:7]], torch.optim.AdamW, lr=0.5, weight_decay=0.1
    )
    opt.add_param_group({"params": [parameter for _, parameter in named[7:]], "lr": 0.25})
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.5**step)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    opt.step()
    schedule.step()
    opt.step()
    elements = sum(state["exp_avg"].numel() for state in opt.state.values())
    return elements, [group["lr"] for group in opt.param_groups], weights_of(model)


def train_different_parts(way):
    """Ranks use different parameters."""
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    wrapped = WAYS[way](model)
    model["a" if dist.get_rank() else "b"](torch.ones(2)).sum().backward()
    wrapped.finish_gradient_synchronization()


def recorded(settings, folder):
    """Bytes by kind of what the recorder of memory sees in a step."""
    rank = dist.get_rank()
    path = Path(folder) / f"rank{rank}.pickle"
    with pytest.MonkeyPatch.context() as patch:
        make_up_allocator(patch)
        config = replace(config_of("cs336", num_layers=3), ranks=dist.get_world_size(), **settings)
        step = TrainingStep(config, rank=rank)
        step(HostClock())
        recorder = MemoryRecorder(step, step.config.device)
        with recorder.watching():
            step(ObservedClock(HostClock(), recorder.mark))
        recorder.dump(path)
    kinds = Counter()
    for sighting in read_notes(notes_path(path)).sightings:
        kinds[sighting.kind.value] += sighting.num_bytes
    return dict(kinds)
