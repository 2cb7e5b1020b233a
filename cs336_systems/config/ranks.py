"""Settings that say how ranks share a step."""

from dataclasses import dataclass
from typing import Annotated

from ..choices import CompileMode, Parallel, Precision, Profiler
from ..rules import (
    GRADIENTS,
    NOT_OF_A_MODULE,
    TRAINING,
    UNSCALED,
    WHOLE_GRADIENTS,
    is_import_name,
    needs,
    not_with,
)
from ..settings import Rule, Setting
from .shortcuts import ShortcutSettings

MAX_RANKS = 2**20
"""Most ranks of one step, more than any step has had: a step of many ranks is predicted, and not
measured.
"""
MAX_MEASURED_RANKS = 64
"""Most ranks of a measured step: they are processes of one machine, which has at most 16 GPUs,
or more CPU cores.
"""
BUCKET_MIB = 25
"""Usual MiB of gradients that are averaged together, as in PyTorch's DistributedDataParallel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings(ShortcutSettings):
    """A step that one process runs, or that several ranks share."""

    parallel: Annotated[
        Parallel,
        Setting(
            "Share each step among --ranks processes, each with its own batch. Ours: ddp-naive "
            "(one all-reduce for each parameter after backward), ddp-flat (one for all), "
            "ddp-overlap (during backward), ddp-push (during backward, by copies to the other "
            "GPUs, which slow computing less than all-reduces do), fsdp (parameters sharded, "
            "gathered ahead of use), fsdp-push (the same by copies from and to the other GPUs). "
            "PyTorch's: ddp (DistributedDataParallel), fsdp2 (fully_shard). own: that of "
            "--own-ddp.",
            plural="parallel",
            word="",
            note="{}",
            rules=(
                GRADIENTS,
                not_with(
                    "--cuda-graph",
                    lambda run: run.cuda_graph,
                    only=lambda run: not run.parallel.takes_any_tensor,
                ),
                not_with(
                    "--cast-once",
                    lambda run: run.cast_once,
                    only=lambda run: not run.parallel.takes_any_tensor,
                ),
                Rule(
                    lambda run: not (run.is_shared and run.cuda_graph and run.sync_phases),
                    "{flag} {config.parallel} with --cuda-graph cannot be combined with "
                    "--sync-phases: one graph holds backward and communication",
                ),
                needs(
                    "--own-ddp", lambda run: run.parallel is not Parallel.OWN or run.own_ddp, "none"
                ),
                not_with(
                    "--compile reduce-overhead",
                    lambda run: run.compile is CompileMode.REDUCE_OVERHEAD,
                ),
                not_with(
                    "--memory",
                    lambda run: run.profiler is Profiler.MEMORY,
                    only=lambda run: run.parallel is Parallel.FSDP2,
                ),
                needs(
                    "--compile-blocks, as parameters are gathered between the blocks",
                    lambda run: (
                        not run.parallel.shards_parameters
                        or run.compile_blocks
                        or run.compile is CompileMode.NONE
                    ),
                    "--compile {config.compile}",
                ),
                not_with(
                    "--precision fp16",
                    lambda run: run.precision is Precision.FP16,
                    only=lambda run: run.parallel.shards_parameters,
                ),
            ),
            group="parallel",
            is_common=True,
        ),
    ] = Parallel.NONE
    ranks: Annotated[
        int,
        Setting(
            "Processes that share a step, each with a GPU of its own, or all on the CPU. The "
            "batch size is that of each. In a sweep of several ways, none is one process. One "
            "rank exchanges with itself.",
            default="1, to be given with --parallel",
            plural="ranks",
            least=1,
            most=MAX_RANKS,
            note="{} ranks",
            rules=(
                needs(
                    "a way to share a step, as in --parallel ddp-overlap",
                    lambda run: run.parallel is not Parallel.NONE,
                    "--parallel {config.parallel}",
                ),
            ),
            group="parallel",
            is_common=True,
        ),
    ] = 1
    own_ddp: Annotated[
        str | None,
        Setting(
            "Your own way to share a step as package.module:Class: made with the module (and "
            "bucket_size_mb, if it takes that), called like it; finish_gradient_synchronization() "
            "comes after backward. It may shard parameters. A sweep has it beside --parallel.",
            metavar="MODULE:CLASS",
            default="none",
            word="",
            column="",
            rules=(
                Rule(
                    lambda run: is_import_name(run.own_ddp), NOT_OF_A_MODULE + "{config.own_ddp!r}"
                ),
            ),
            used_with=("parallel", (Parallel.OWN,)),
        ),
    ] = None
    bucket_mib: Annotated[
        int,
        Setting(
            "MiB of gradients that ddp-overlap averages together, or an own way that asks; 0: "
            "each parameter alone.",
            plural="bucket_mib",
            least=0,
            most=2**20,
            note="buckets of {} MiB",
            used_with=("parallel", (Parallel.DDP_OVERLAP, Parallel.OWN)),
        ),
    ] = BUCKET_MIB
    shard_optimizer: Annotated[
        bool,
        Setting(
            "Keep on each rank the optimizer's state of only its share of the parameters; after "
            "the optimizer's step the ranks exchange what they updated.",
            plural="",
            note="sharded optimizer",
            rules=(WHOLE_GRADIENTS, TRAINING, UNSCALED),
            group="parallel",
        ),
    ] = False

    @property
    def is_shared(self) -> bool:
        """Whether ranks share each step; one rank alone can too, and then exchanges with itself."""
        return self.parallel is not Parallel.NONE
