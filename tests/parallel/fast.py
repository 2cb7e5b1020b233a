"""The fast model on ranks, and the same in one process that averages the ranks' gradients
itself.
"""

import torch
import torch.distributed as dist

from cs336.config import (
    Arch,
    Attention,
    Device,
    ModelConfig,
    OptimizerKind,
    Parallel,
    Precision,
    RunConfig,
)
from cs336.measure.clock import EventClock, HostClock
from cs336.measure.step import TrainingStep
from cs336.model.batches import make_batches
from cs336.model.fast.master_adamw import MasterAdamW, storage_of
from cs336.model.fast.weights import whole
from cs336.model.transformer import TransformerLM
from cs336.parallel.collectives import TrafficCounter
from cs336.parallel.fast_sharded import ShardedMasterAdamW
from cs336.parallel.packs import OwnsWeights
from tests.model.fast.steps import EPS, with_smooth_updates

STEPS, LEARNING_RATE = 3, 1e-2
UNSAFE_ON_GLOO = {"allreduce_coalesced", "allgather_into_tensor_coalesced"}
"""Both threads of gloo write such a long name of a completed collective to one string without a
lock (PyTorch 2.13).
"""


@torch.no_grad()
def of_all_ranks(part):
    """The parts of all ranks, one after the other."""
    parts = [
        torch.empty_like(part, memory_format=torch.contiguous_format)
        for _ in range(dist.get_world_size())
    ]
    dist.all_gather(parts, part.contiguous())
    return torch.cat([each.view(-1) for each in parts])


def whole_masters(sharding, model):
    """The masters whole, by their names in the model: of several that are one tensor, each rank
    may have a part.
    """
    shapes = {name: each.shape for name, each in TransformerLM(model).named_parameters()}
    found = {}
    for joined, weight in sharding.named_weights:
        names, values = joined.split(" + "), weight.values()
        is_part = values.shape != shapes[names[0]]
        flat = of_all_ranks(values) if is_part else values.reshape(-1)
        for name in names:
            found[name] = flat[: shapes[name].numel()].view(shapes[name]).clone()
            flat = flat[shapes[name].numel() :]
    return found


def sent_by(traffic):
    """Bytes that a rank sends, by collectives that both threads of gloo may complete at once."""
    assert dist.get_backend() == "nccl" or not UNSAFE_ON_GLOO & {
        each.collective for each in traffic
    }
    return sum(each.sent_bytes for each in traffic)


def config_of(arch, way="none", shard=False, ranks=1, device="cpu", num_layers=2, **changes):
    # packed attention takes no heads of 16; and at the rate of a narrow model, rounding would
    # change a wide one a lot
    d_head, learning_rate = (
        (64, LEARNING_RATE / 10) if changes.get("packed_attention") else (16, LEARNING_RATE)
    )
    model = ModelConfig(
        arch=Arch(arch),
        vocab_size=90,
        context_length=16,
        d_model=2 * d_head,
        d_ff=64,
        num_layers=num_layers,
        num_heads=2,
        attention=Attention.SDPA,
    )
    return RunConfig(
        size="custom",
        model=model,
        batch_size=2,
        precision=Precision.BF16,
        optimizer=OptimizerKind.FUSED,
        cast_once=True,
        fused_blocks=True,
        fused_loss=True,
        pad_vocabulary=64,
        parallel=Parallel(way),
        ranks=ranks,
        shard_optimizer=shard,
        learning_rate=learning_rate,
        device=Device(device),
        cuda_graph=device == "cuda",
        seed=1,
        **changes,
    )


def train(way, arch, shard, device="cpu", changes=None):
    """Masters after some steps on this rank, elements that its optimizer updates, losses,
    traffic of the last step.
    """
    rank = dist.get_rank()
    torch.manual_seed(rank)
    config = config_of(arch, way, shard, dist.get_world_size(), device, **(changes or {}))
    step = with_smooth_updates(TrainingStep(config, rank=rank))
    clock = HostClock() if device == "cpu" else EventClock()
    # some before graphs
    losses = [step(clock)[1].item() for _ in range(STEPS - 1 if device == "cpu" else STEPS + 2)]
    with TrafficCounter() as counter:
        losses.append(step(clock)[1].item())
    sharding = step.optimizer if isinstance(step.optimizer, ShardedMasterAdamW) else step.way
    if isinstance(sharding, OwnsWeights):
        masters = {
            name: each.cpu() for name, each in whole_masters(sharding, step.config.model).items()
        }
    else:
        names = (name for name, _ in step.model.named_parameters())
        masters = {
            name: weight.values().cpu().clone()
            for name, weight in zip(names, step.model.weights, strict=True)
        }
    updated = sum(state["exp_avg"].numel() for state in step.optimizer.state.values())
    copies = {
        id(weight.copy.leaf): weight.copy.leaf.detach().cpu()
        for weight in step.model.weights
        if weight.copy
    }
    copies = [each.clone() for each in copies.values()]
    return masters, updated, losses, sent_by(counter.traffic()), copies


def kept(way, shard):
    """After a step, elements of copies of masters that are split, and bytes of their remainders
    and masters.
    """
    config = config_of("gpt2", way, shard, dist.get_world_size(), split_masters=True)
    step = TrainingStep(config, rank=dist.get_rank())
    step(HostClock())
    split = [weight for weight in step.optimizer._weights if weight.read is None]
    elements = sum(weight.copy.values.numel() for weight in split)
    return (
        elements,
        sum(weight.remainder.nbytes for weight in split),
        sum(weight.master.nbytes for weight in split),
    )


def train_frozen(way, shard):
    """Names of the matrices that some steps change, where those of the second block are frozen."""
    config = config_of("cs336", way, shard, dist.get_world_size(), num_layers=3)
    torch.manual_seed(0)
    model = TransformerLM(config.model)
    model.layers[1].requires_grad_(False)
    before = {
        name: each.detach().clone() for name, each in model.named_parameters() if each.ndim > 1
    }
    step = TrainingStep(config, model, rank=dist.get_rank())
    for _ in range(2):
        step(HostClock())
    sharding = step.optimizer if isinstance(step.optimizer, ShardedMasterAdamW) else step.way
    is_sharded = isinstance(sharding, OwnsWeights)
    after = (
        whole_masters(sharding, config.model) if is_sharded else dict(step.model.named_parameters())
    )
    return [name for name, each in before.items() if not torch.equal(after[name], each)]


def rounded_away(values):
    """The nearest values in bf16; of two that are equally near, the one away from zero."""
    cut = (values.view(torch.int32) & -(2**16)).view(torch.float32)
    exact = values.double().abs()
    magnitude, step = cut.double().abs(), 2.0 ** (torch.frexp(cut).exponent - 8).double()
    up = exact - magnitude >= step / 2
    return torch.copysign(magnitude + step * up, values.double()).bfloat16()


def train_alone(arch, ranks, axes_in_fp32=None, changes=None):
    """The weights before, the masters after the same steps in one process, that of rank 0; losses
    by rank.

    It averages in the gradients' own types; or it adds up those with so many axes or more in fp32,
    for an optimizer that knows of masters only. Masters are never split: their copies are rounded
    here as those of split ones.
    """
    if dist.get_rank():
        return None
    changes = dict(changes or {})
    splits = changes.pop("split_masters", False)
    config = config_of(arch, **changes)
    torch.manual_seed(0)
    step = with_smooth_updates(TrainingStep(config))
    batches = [
        make_batches(config_of(arch, "ddp-flat", ranks=ranks, **changes), rank)
        for rank in range(ranks)
    ]
    read = [weight.copy.leaf for weight in step.model.weights if weight.copy]
    leaves = list({id(leaf): leaf for leaf in (*step.model.parameters(), *read)}.values())
    of_masters = MasterAdamW(
        [whole(weight.master) for weight in step.model.weights],
        storage_of(config),
        lr=config.learning_rate,
        eps=EPS,
    )
    before = {name: master.detach().clone() for name, master in step.model.named_parameters()}

    def round_copies():
        for weight in step.model.weights:
            if weight.copy and not splits:
                weight.refresh()
            elif weight.copy:
                rounding = torch.Tensor.bfloat16 if weight.read else rounded_away
                weight.copy.values.copy_(rounding(weight.master.detach()).view(-1))

    round_copies()
    losses = []
    for _ in range(STEPS):
        found = []
        for batch in batches:
            loss = step.forward(batch())
            step.backward(loss)
            found.append(
                ([None if leaf.grad is None else leaf.grad.clone() for leaf in leaves], loss.item())
            )
            step.optimizer.zero_grad()
        losses.append([loss for _, loss in found])
        sums = {}
        for leaf, *gradients in zip(leaves, *(gradients for gradients, _ in found), strict=True):
            if gradients[0] is not None:
                leaf.grad = sum(gradients) / ranks
                is_wide = axes_in_fp32 is not None and leaf.ndim >= axes_in_fp32
                sums[leaf] = (
                    sum(gradient.float() for gradient in gradients) / ranks
                    if is_wide
                    else leaf.grad.float()
                )
        if axes_in_fp32 is not None:
            for weight in step.model.weights:
                weight.master.grad = sums.get(weight.master, torch.zeros_like(weight.master))
                if weight.copy:
                    weight.master.grad.view(-1).add_(
                        sums[weight.copy.leaf].view(-1)[weight.copy.elements]
                    )
            of_masters.step()
        else:
            step.optimizer.step()
        round_copies()
        step.optimizer.zero_grad()
    return before, {name: each.detach() for name, each in step.model.named_parameters()}, losses
