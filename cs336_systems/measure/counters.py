"""Counters of the CUDA allocator and of torch.compile, read outside of the timed steps."""

from dataclasses import dataclass

import torch

from cs336_systems.config import CompileMode, Device, RunConfig
from cs336_systems.record import Compilation, Memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Values of the counters at one moment; `allocator` is None on a CPU."""

    allocator: dict[str, int] | None
    graphs: int

    def memory_since(
        self, before: "Counters", first_step_peak_bytes: int | None, graph_peak_bytes: int | None = None
    ) -> Memory | None:
        """The allocator's work since `before`, whose reading reset the peaks; None on a CPU.

        A replayed CUDA graph allocates nothing, so `graph_peak_bytes` gives the peak during its capture.
        """
        if self.allocator is None or before.allocator is None:
            return None
        return Memory(
            peak_allocated_bytes=max(self.allocator["allocated_bytes.all.peak"], graph_peak_bytes or 0),
            peak_reserved_bytes=self.allocator["reserved_bytes.all.peak"],
            first_step_peak_allocated_bytes=first_step_peak_bytes,
            segments_allocated=self.allocator["segment.all.allocated"] - before.allocator["segment.all.allocated"],
            alloc_retries=self.allocator["num_alloc_retries"] - before.allocator["num_alloc_retries"],
        )


def read_counters(config: RunConfig, reset_peaks: bool = False) -> Counters:
    """The counters now; with `reset_peaks`, the allocator's peaks start again from here."""
    if config.device is Device.CPU:
        return Counters(allocator=None, graphs=compiled_graphs(config))
    if reset_peaks:
        torch.cuda.reset_peak_memory_stats()
    return Counters(allocator=torch.cuda.memory_stats(), graphs=compiled_graphs(config))


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
