"""FLOPs of models that are sharded over two ranks, beside PyTorch's counter on the whole model."""

import contextlib
import datetime
import json
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from cs336 import watch

pytestmark = pytest.mark.skipif(torch.__version__ < (2, 7), reason="it shards only on a GPU")

WORLD, WIDTH, HEADS, VOCABULARY = 2, 32, 4, 48
TOKENS = torch.arange(2 * 16).view(2, 16) % VOCABULARY


class Block(nn.Module):
    """Attention with as many heads as the rank has, and an MLP that may drop elements."""

    def __init__(self, drops):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.1 if drops else 0.0)

    def heads(self, layer, x):
        return layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)

    def forward(self, x):
        parts = [self.heads(layer, x) for layer in (self.query, self.key, self.value)]
        mixed = scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(self.dropout(self.up(self.norm(x)).relu()))


class Language(nn.Module):
    def __init__(self, drops=False):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(drops) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.first = [self.blocks[0]]
        """A part that is known by another way, too."""

    def forward(self, tokens):
        x = self.first[0](self.embedding(tokens))
        return self.head(self.blocks[1](x))


def mesh_of():
    return dist.device_mesh.init_device_mesh("cpu", (WORLD,))


def gathered(low=False):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = Language()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if low else None)
    for block in model.blocks:
        fully_shard(block, mesh=mesh_of(), mp_policy=policy)
    return fully_shard(model, mesh=mesh_of(), mp_policy=policy)


def parallel(drops=False):
    """Tensor parallelism of the blocks, while the head is whole on each rank."""
    from torch.distributed.tensor import parallel

    columns, rows = parallel.ColwiseParallel, parallel.RowwiseParallel
    names = {name: columns() for name in ("query", "key", "value")}
    up = columns(use_local_output=not drops)
    plan = {**names, "out": rows(), "up": up, "down": rows()}
    model = Language(drops)
    for block in model.blocks:
        parallel.parallelize_module(block, mesh_of(), plan)
    return model


def both():
    """Sharded by `fully_shard` over groups of one, within tensor parallelism of two."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import parallel

    mesh = dist.device_mesh.init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("data", "tensor"))
    model = Language()
    plan = {"up": parallel.ColwiseParallel(), "down": parallel.RowwiseParallel()}
    for block in model.blocks:
        parallel.parallelize_module(block, mesh["tensor"], plan)
        fully_shard(block, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])


KINDS = {
    "gathered": gathered,
    "low": lambda: gathered(low=True),
    "parallel": parallel,
    "both": both,
    "dropping": lambda: parallel(drops=True),
}


def trained(make, watched=None):
    """The losses of some steps, with an evaluation at each end; rank 0 alone asks in between."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told = None
    with (
        contextlib.nullcontext()
        if watched is None
        else watch(
            model, optimizer, name=watched[0], warmup_steps=0, output=watched[1], every=0
        ) as watched
    ):
        losses = []
        for _ in range(3):
            with contextlib.nullcontext() if watched is None else watched.step():
                loss = model(TOKENS).float().square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            with torch.no_grad():
                model(TOKENS)
            if watched is not None and dist.get_rank() == 0:
                told = watched.record().seen
        if watched is not None:
            watched.remove()
    return losses, told


def run_rank(rank, folder):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # a collective that one rank alone calls ends the test
    limit = datetime.timedelta(seconds=30)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD, timeout=limit)
    for name, make in KINDS.items():
        torch.manual_seed(1)
        alone, _ = trained(make)
        torch.manual_seed(1)
        losses, told = trained(make, (name, folder))
        if told is not None:
            flops = None if told.flops is None else told.flops.per_step
            answer = {"flops": flops, "reason": told.not_traced, "same": alone == losses}
            (folder / f"{name}.json").write_text(json.dumps(answer))
        dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    torch.multiprocessing.start_processes(run_rank, (folder,), nprocs=WORLD, start_method="fork")
    return folder


def counted(module, *inputs):
    """What PyTorch counts in forward and backward of a whole module."""
    with (
        sdpa_kernel(SDPBackend.MATH),
        torch.backends.mkldnn.flags(enabled=False),
        FlopCounterMode(display=False) as counter,
    ):
        module(*inputs).sum().backward()
    return counter.get_total_flops()


def test_a_rank_computes_with_its_share_of_the_model(folder):
    """With `fully_shard`, with the whole model."""
    model = Language()
    whole = counted(model, TOKENS)
    head = counted(model.head, torch.ones(2, 16, WIDTH, requires_grad=True))
    x = torch.ones(2, 16, WIDTH, requires_grad=True)
    mlps = [counted(nn.Sequential(block.up, block.down), x) for block in model.blocks]
    expected = {
        "gathered": whole,
        "low": whole,
        "parallel": (whole - head) / WORLD + head,
        "both": whole - sum(mlps) / WORLD,
    }
    for name, flops in expected.items():
        answer = json.loads((folder / f"{name}.json").read_text())
        assert answer == {"flops": flops, "reason": "", "same": True}, name


def test_numbers_that_ranks_draw_together_are_not_drawn(folder):
    """A trace would change what the ranks draw later."""
    answer = json.loads((folder / "dropping.json").read_text())
    assert answer["flops"] is None
    assert "draws" in answer["reason"]
    assert answer["same"]
