"""The fast model on ranks, and the same in one process that averages the ranks' gradients
itself.
"""

import unittest.mock

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
from cs336.model.fast import cross_entropy
from cs336.model.fast.master_adamw import MasterAdamW, storage_of
from cs336.model.fast.weights import whole
from cs336.model.transformer import TransformerLM
from cs336.parallel.collectives import TrafficCounter
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
    return torch.cat([piece.view(-1) for piece in parts])


def whole_masters(weights, model):
    """The masters whole, by their names in the model: of several that are one tensor, each rank
    may have a part.
    """
    shapes = {name: parameter.shape for name, parameter in TransformerLM(model).named_parameters()}
    masters = {}
    for weight in weights:
        names, values = weight.name.split(" + "), weight.values()
        is_part = values.shape != shapes[names[0]]
        flat = of_all_ranks(values) if is_part else values.reshape(-1)
        for name in names:
            masters[name] = flat[: shapes[name].numel()].view(shapes[name]).clone()
            flat = flat[shapes[name].numel() :]
    return masters


def sent_by(traffic):
    """Bytes that a rank sends, by collectives that both threads of gloo may complete at once."""
    assert dist.get_backend() == "nccl" or not UNSAFE_ON_GLOO & {
        counted.collective for counted in traffic
    }
    return sum(counted.sent_bytes for counted in traffic)


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
        bf16_embedding=changes.pop("bf16_embedding", True),
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
    masters = whole_masters(step.optimizer.weights, step.config.model)
    masters = {name: master.cpu() for name, master in masters.items()}
    updated = sum(state["exp_avg"].numel() for state in step.optimizer.state.values())
    leaves = dict.fromkeys(weight.copy.leaf for weight in step.model.weights if weight.copy)
    copies = [leaf.detach().cpu().clone() for leaf in leaves]
    return masters, updated, losses, sent_by(counter.traffic()), copies


def missing_factors(way, micro_batches):
    """What this rank multiplies gradients of logits by in a step, one factor each micro-batch."""
    config = config_of("cs336", way, ranks=dist.get_world_size(), accumulate_steps=micro_batches)
    step = TrainingStep(config, rank=dist.get_rank())
    with unittest.mock.patch.object(cross_entropy, "_multiply") as multiply:
        step(HostClock())
    return [factor.item() * divisor for (factor, divisor, _), _ in multiply.call_args_list]


def kept(way, shard):
    """After a step, elements of copies of masters that are split, and bytes of their remainders
    and masters.
    """
    config = config_of("gpt2", way, shard, dist.get_world_size(), split_masters=True)
    step = TrainingStep(config, rank=dist.get_rank())
    step(HostClock())
    split = [weight for weight in step.optimizer.weights if weight.read is None]
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
    parameters = model.named_parameters()
    before = {name: matrix.detach().clone() for name, matrix in parameters if matrix.ndim > 1}
    step = TrainingStep(config, model, rank=dist.get_rank())
    for _ in range(2):
        step(HostClock())
    after = whole_masters(step.optimizer.weights, config.model)
    return [name for name, matrix in before.items() if not torch.equal(after[name], matrix)]


def rounded_away(values):
    """The nearest values in bf16; of two that are equally near, the one away from zero."""
    cut = (values.view(torch.int32) & -(2**16)).view(torch.float32)
    exact = values.double().abs()
    magnitude, step = cut.double().abs(), 2.0 ** (torch.frexp(cut).exponent - 8).double()
    up = exact - magnitude >= step / 2
    return torch.copysign(magnitude + step * up, values.double()).bfloat16()


def round_copies(weights, splits):
    """Write the copies of the masters; with `splits` rounded as those of split masters are."""
    for weight in weights:
        if weight.copy and not splits:
            weight.refresh()
        elif weight.copy:
            rounding = torch.Tensor.bfloat16 if weight.read else rounded_away
            weight.copy.values.copy_(rounding(weight.master.detach()).view(-1))


def gradients_of(step, batch, leaves):
    """The part of a micro-batch in its step's loss, and the gradients of the leaves that have
    one.
    """
    loss = step.forward(batch()) / step.config.accumulate_steps
    step.backward(loss)
    gradients = {leaf: leaf.grad.clone() for leaf in leaves if leaf.grad is not None}
    step.optimizer.zero_grad()
    return loss.item(), gradients


def give_to_masters(weights, gradients):
    """Add up the gradients of master and copy as the master's, in fp32."""
    for weight in weights:
        total = gradients.get(weight.master, torch.zeros_like(weight.master))
        weight.master.grad = total
        if weight.copy:
            of_copy = gradients[weight.copy.leaf].view(-1)[weight.copy.elements]
            total.view(-1).add_(of_copy)


def add_means(means, by_rank, axes_in_fp32):
    """Add to `means` those over ranks of the gradients of each leaf, of those with so many axes in
    fp32.

    Vectors, which every rank has whole, are averaged with what was there before.
    """
    for leaf in by_rank[0]:
        gradients = [of_rank[leaf] for of_rank in by_rank]
        if axes_in_fp32 is not None and leaf.ndim >= axes_in_fp32:
            gradients = [gradient.float() for gradient in gradients]
        earlier = means.get(leaf, torch.zeros_like(gradients[0]))
        if leaf.ndim == 1:
            means[leaf] = sum(earlier + gradient for gradient in gradients) / len(gradients)
        else:
            means[leaf] = earlier + sum(gradients) / len(gradients)


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
    shared = config_of(arch, "ddp-flat", ranks=ranks, **changes)
    torch.manual_seed(0)
    step = with_smooth_updates(TrainingStep(config))
    batches = [make_batches(shared, rank) for rank in range(ranks)]
    weights = step.model.weights
    read = [weight.copy.leaf for weight in weights if weight.copy]
    leaves = list(dict.fromkeys([*step.model.parameters(), *read]))
    masters = [whole(weight.name, weight.master) for weight in weights]
    of_masters = MasterAdamW(masters, storage_of(config), lr=config.learning_rate, eps=EPS)
    before = {name: master.detach().clone() for name, master in step.model.named_parameters()}
    round_copies(weights, splits)
    losses = []
    for _ in range(STEPS):
        by_rank = [0.0] * ranks
        means = {}
        for _ in range(config.accumulate_steps):
            parts = [gradients_of(step, batch, leaves) for batch in batches]
            by_rank = [loss + part for loss, (part, _) in zip(by_rank, parts, strict=True)]
            add_means(means, [gradients for _, gradients in parts], axes_in_fp32)
        losses.append(by_rank)
        if axes_in_fp32 is None:
            for leaf, mean in means.items():
                leaf.grad = mean
            step.optimizer.step()
        else:
            give_to_masters(weights, {leaf: mean.float() for leaf, mean in means.items()})
            of_masters.step()
        round_copies(weights, splits)
        step.optimizer.zero_grad()
    return before, {name: master.detach() for name, master in step.model.named_parameters()}, losses
