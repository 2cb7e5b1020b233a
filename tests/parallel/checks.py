"""What the ranks of these tests do, and the same in one process with the whole batch."""

import functools
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from cs336_systems.analysis.memory.notes import notes_path, read_notes
from cs336_systems.config import Arch, ModelConfig
from cs336_systems.measure.clock import HostClock
from cs336_systems.measure.memory import MemoryRecorder
from cs336_systems.measure.step import TrainingStep
from cs336_systems.model.transformer import TransformerLM
from cs336_systems.parallel.collectives import TrafficCounter
from cs336_systems.parallel.data_parallel import FlatDDP, NaiveDDP, OverlapDDP, PushDDP, ShardedOptimizer
from cs336_systems.parallel.fully_sharded import FSDP
from cs336_systems.parallel.ways import TorchDDP, TorchFSDP
from tests.measure.allocator import make_up_allocator
from tests.parallel.fast import config_of, sent_by

SHAPE = {"vocab_size": 37, "context_length": 8, "d_model": 24, "d_ff": 40, "num_layers": 3, "num_heads": 2}
STEPS, BATCH = 10, 6
"""A batch that 2 and 3 ranks can share."""
WAYS = {
    "ddp-naive": NaiveDDP,
    "ddp-flat": FlatDDP,
    "ddp-overlap": functools.partial(OverlapDDP, bucket_bytes=8000),
    "ddp-push": PushDDP,
    "ddp": TorchDDP,
    "fsdp": FSDP,
    "fsdp-push": functools.partial(FSDP, copies=True),
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


def device():
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def loss_of(model, tokens):
    tokens = tokens.to(next(model.parameters()).device)
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def weights_of(model):
    """All parameters whole; PyTorch's FSDP has parts of them, which it gathers."""
    named = ((name, each.detach()) for name, each in model.named_parameters())
    return {name: (each.full_tensor() if hasattr(each, "full_tensor") else each).cpu().clone() for name, each in named}


def train_alone(kind, optimizer, dtype, seed=0):
    """The weights after training in one process with the whole batch."""
    model = make_model(kind, seed, dtype).to(device())
    opt = OPTIMIZERS[optimizer](model.parameters())
    for tokens in batches():
        loss_of(model, tokens).backward()
        opt.step()
        opt.zero_grad()
    return weights_of(model)


def train(way, kind, optimizer, dtype, shard=False, compiled=False):
    """The weights after training on this rank with its part of each batch; rank 0's seed is 0.

    If `compiled`, each block is, in one graph for all blocks and steps.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = make_model(kind, rank, dtype).to(device())
    if compiled:
        torch._dynamo.reset()
        torch._dynamo.config.error_on_recompile = True
        for block in model.layers:
            block.compile(backend="aot_eager", fullgraph=True)
    wrapped = WAYS[way](model)
    make = OPTIMIZERS[optimizer]
    opt = ShardedOptimizer(wrapped.parameters(), make) if shard else make(wrapped.parameters())
    own = BATCH // ranks
    for tokens in batches():
        loss_of(wrapped, tokens[rank * own : (rank + 1) * own]).backward()
        wrapped.finish_gradient_synchronization()
        opt.step()
        opt.zero_grad()
    if not hasattr(wrapped, "gather_full_parameters"):
        return weights_of(model)
    return {name: each.cpu() for name, each in wrapped.gather_full_parameters().items()}


def train_in_bf16(way):
    """As `train`, in bf16 as far as the way says; the types of the weights in forward, and of the gradients."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = make_model("cs336", rank, torch.float32)
    seen = {}
    wrapped = WAYS[way](model, torch.bfloat16)
    for name in ("token_embeddings", "layers.1.ln1", "layers.1.attn.q_proj", "lm_head"):
        model.get_submodule(name).register_forward_pre_hook(
            lambda module, _, name=name: seen.__setitem__(name, (module.weight.dtype, tuple(module.weight.shape)))
        )
    opt = OPTIMIZERS["sgd"](wrapped.parameters())
    own = BATCH // ranks
    for tokens in batches():
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(wrapped, tokens[rank * own : (rank + 1) * own])
        loss.backward()
        wrapped.finish_gradient_synchronization()
        types = {each.grad.dtype for each in wrapped.parameters()}
        opt.step()
        opt.zero_grad()
    masters = wrapped.gather_full_parameters() if hasattr(wrapped, "gather_full_parameters") else weights_of(model)
    return seen, types, {name: each.dtype for name, each in masters.items()}, loss.item()


def train_alone_in_bf16():
    """The last loss of the same in one process with the whole batch."""
    model = make_model("cs336", 0, torch.float32)
    opt = OPTIMIZERS["sgd"](model.parameters())
    for tokens in batches():
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, tokens)
        loss.backward()
        opt.step()
        opt.zero_grad()
    return loss.item()


def traffic_of(way, kind):
    """What one step sends in backward and after it, once the way is in its steady state."""
    wrapped = WAYS[way](make_model(kind, 0, torch.float32))
    tokens = batches()[0][:2]
    for _ in range(4):  # PyTorch's DDP sends how it splits the gradients in its third
        counters = TrafficCounter(), TrafficCounter(), TrafficCounter()
        with counters[0]:
            loss = loss_of(wrapped, tokens)
        with counters[1]:
            loss.backward()
        with counters[2]:
            wrapped.finish_gradient_synchronization()
        wrapped.zero_grad()
    return [sent_by(counter.traffic()) for counter in counters]


def shards():
    """Of a model under FSDP: elements of its parameters, bytes of what is gathered by place, and names of shards."""
    model = make_model("cs336", 0, torch.float32)
    wrapped = FSDP(model)
    gathered = []

    def note(*_):
        storages = [flat.gathered.untyped_storage() for unit in wrapped._units for flat in unit.flats]
        gathered.append(sum(each.nbytes() for each in storages))

    for block in model.layers:
        block.attn.register_forward_pre_hook(note)
    between = []
    for tokens in batches()[:3]:
        loss_of(wrapped, tokens[:2]).backward()
        wrapped.finish_gradient_synchronization()
        note()
        between.append(gathered.pop())
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
    gradients = {name: tuple(each.grad.shape) for name, each in model.named_parameters()}
    return shapes, gradients, between, gathered


def shared_states():
    """Elements of the optimizer's state on this rank, the groups' learning rates, and the weights."""
    torch.manual_seed(0)
    model = make_model("gpt2", 0, torch.float32)
    named = list(model.named_parameters())
    opt = ShardedOptimizer([each for _, each in named[:7]], torch.optim.AdamW, lr=0.5, weight_decay=0.1)
    opt.add_param_group({"params": [each for _, each in named[7:]], "lr": 0.25})
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.5**step)
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    opt.step()
    schedule.step()
    opt.step()
    elements = sum(each["exp_avg"].numel() for each in opt.state.values())
    return elements, [group["lr"] for group in opt.param_groups], weights_of(model)


def gradient_on_rank_0_only(way):
    """The error of a way whose ranks use different parameters."""
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    wrapped = WAYS[way](model)
    model["a" if dist.get_rank() else "b"](torch.ones(2)).sum().backward()
    try:
        wrapped.finish_gradient_synchronization()
    except ValueError as error:
        return str(error)
    return ""


def accumulated(way):
    """Weights after two steps whose gradients are those of two backwards on this rank; or what the way says to that."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = make_model("cs336", rank, torch.float64)
    wrapped = WAYS[way](model)
    opt = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    own = BATCH // ranks
    try:
        for start in (0, 2):
            for tokens in batches()[start : start + 2]:
                loss_of(wrapped, tokens[rank * own : (rank + 1) * own]).backward()
            wrapped.finish_gradient_synchronization()
            opt.step()
            opt.zero_grad()
    except RuntimeError as error:
        return str(error)
    return wrapped.gather_full_parameters() if hasattr(wrapped, "gather_full_parameters") else weights_of(model)


def accumulated_alone():
    """The weights in one process with the whole batches."""
    model = make_model("cs336", 0, torch.float64)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for start in (0, 2):
        for tokens in batches()[start : start + 2]:
            loss_of(model, tokens).backward()
        opt.step()
        opt.zero_grad()
    return weights_of(model)


def recorded(settings, folder):
    """Bytes by kind of what the recorder of memory sees in a step."""
    rank = dist.get_rank()
    path = Path(folder) / f"rank{rank}.pickle"
    with pytest.MonkeyPatch.context() as patch:
        make_up_allocator(patch)
        step = TrainingStep(replace(config_of("cs336"), ranks=dist.get_world_size(), **settings), rank=rank)
        step(HostClock())
        recorder = MemoryRecorder(step)
        with recorder.watching():
            step(recorder.clock(HostClock()))
        recorder.dump(path)
    kinds = Counter()
    for each in read_notes(notes_path(path)).sightings:
        kinds[each.kind.value] += each.num_bytes
    return dict(kinds)
