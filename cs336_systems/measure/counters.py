"""Counters of the CUDA allocator and of torch.compile, read outside of the timed steps."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from cs336_systems.config import CompileMode, Device, RunConfig
from cs336_systems.measure.step import TrainingStep
from cs336_systems.record import Compilation, Memory, MemoryMoment, MomentName


def reset_memory(config: RunConfig) -> dict[str, int] | None:
    """The allocator's counters now, whose peaks start again from here; None on a CPU."""
    if config.device is Device.CPU:
        return None
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_stats()


def memory_since(
    before: dict[str, int] | None, first_step_peak_bytes: int | None, graph_peak_bytes: int | None
) -> Memory | None:
    """The allocator's work since `reset_memory` returned `before`; None on a CPU.

    A replayed CUDA graph allocates nothing, so `graph_peak_bytes` gives the peak during its capture.
    """
    if before is None:
        return None
    after = torch.cuda.memory_stats()
    return Memory(
        peak_allocated_bytes=max(after["allocated_bytes.all.peak"], graph_peak_bytes or 0),
        peak_reserved_bytes=after["reserved_bytes.all.peak"],
        first_step_peak_allocated_bytes=first_step_peak_bytes,
        segments_allocated=after["segment.all.allocated"] - before["segment.all.allocated"],
        alloc_retries=after["num_alloc_retries"] - before["num_alloc_retries"],
    )


def compiled_graphs(config: RunConfig) -> int:
    """Number of graphs that torch.compile has made so far; each recompilation adds one."""
    if config.compile is CompileMode.NONE:
        return 0
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def compilation(config: RunConfig, before: Compilation | None = None) -> Compilation | None:
    """What torch.compile has done in this process, since `before` if that is given; None for an eager run."""
    if config.compile is CompileMode.NONE:
        return None
    from torch._dynamo.utils import calculate_time_spent, counters, get_compilation_metrics

    # A compile id is frame/attempt, so attempt 0 is no recompilation. Backward has the id of its forward.
    ids = {str(metrics.compile_id) for metrics in get_compilation_metrics()}
    return Compilation(
        seconds=calculate_time_spent()["total_wall_time"] - (before.seconds if before else 0),
        graphs=compiled_graphs(config) - (before.graphs if before else 0),
        graph_breaks=sum(counters["graph_break"].values()) - (before.graph_breaks if before else 0),
        recompiles=sum(not name.endswith("/0") for name in ids) - (before.recompiles if before else 0),
    )


def memory_now(step: TrainingStep, moment: MomentName) -> MemoryMoment:
    """What the step's tensors take now."""
    trained = list(_trained(step))
    states = [] if step.optimizer is None else step.optimizer.state.values()
    return MemoryMoment(
        moment=moment,
        allocated_bytes=torch.cuda.memory_allocated() if step.config.device is Device.CUDA else None,
        parameters_bytes=_bytes(trained),
        gradients_bytes=_bytes(tensor.grad for tensor in trained if tensor.grad is not None),
        optimizer_state_bytes=_bytes(value for state in states for value in state.values() if torch.is_tensor(value)),
    )


def _trained(step: TrainingStep) -> Iterator[Tensor]:
    """The parameters that this rank keeps, whole or in part, and their copies in low precision."""
    found: dict[int, Tensor] = {id(each): each for each in step.model.parameters()}
    for weight in getattr(step.model, "weights", ()):
        kept = (weight.master, weight.remainder, None if weight.copy is None else weight.copy.leaf)
        found |= {id(each): each for each in kept if each is not None}
    yield from found.values()


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors; a tensor that PyTorch has sharded counts with this rank's part."""
    return sum((tensor.to_local() if hasattr(tensor, "to_local") else tensor).nbytes for tensor in tensors)
