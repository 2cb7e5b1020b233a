"""What a step of a layout takes: memory, time, and of what the time consists; or why neither is
foretold.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from ..config import Attention, CompileMode, Mode, OptimizerKind, Phase, Precision, RunConfig
from .accounting import step_flops
from .blocks import blocks_of_model
from .compiled import uncompiled
from .curves import Curves
from .depth import DepthError, of_depth, step_by_depth
from .layout import Layout, misfit, rank_layouts
from .layout_memory import Rank, fullest_rank_bytes
from .layout_time import LayoutTime, layout_time
from .memory import is_predictable
from .ranks_time import Links
from .recipes import Recipe
from .tape import Names, OperationKey, OperationMaker
from .time import NO_CONVOLUTIONS, flops_of, has_convolutions
from .traces import axes, is_compiled, why_untraced

HOST_OF_BLOCK_S = {Phase.FORWARD: 2.1e-3, Phase.BACKWARD: 3.3e-3}
"""Longest that the host took for a compiled block, with its guards and its wrappers: xl on two
H200, whose 48 blocks' kernels take less (data/published/parallel/e2e_benchmark/xl_fast). Without
FSDP it took 1.1 and 2.4 ms.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutCost:
    """The forecast of a step of a layout."""

    layout: Layout
    time: LayoutTime
    peak_bytes: int
    """Tensors of the fullest rank."""
    flops: int
    """Model FLOPs of the step on all ranks together."""
    asked: tuple[tuple[str, object], ...] | None = None
    """Of a step with --fast, the settings that are asked for beside the model."""

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.time.step_s

    @property
    def gpu_flops_per_s(self) -> float:
        """Model FLOPs that each GPU computes in a second."""
        return self.flops / self.layout.gpus / self.step_s


def layout_cost(
    config: RunConfig, layout: Layout, curves: Curves, links: Links
) -> LayoutCost | str:
    """The cost of a training step of a layout on GPUs that have these curves, joined by these
    links; or the reason why it is not foretold.

    `config` is the step in one process: its batch size and checkpoints are the layout's instead.
    """
    peak_bytes = layout_bytes(config, layout, links)
    if isinstance(peak_bytes, str):
        return peak_bytes
    time = layout_time(Rank(config=config, layout=layout), curves, links)
    if reason := _why_host_decides(config, time):
        return reason
    return LayoutCost(
        layout=layout,
        time=time,
        peak_bytes=peak_bytes,
        flops=layout.global_batch * sequence_flops(config),
    )


def _why_host_decides(config: RunConfig, time: LayoutTime) -> str:
    """Why the time of a step of compiled blocks is not foretold; empty if it is."""
    if not is_compiled(config):
        return ""
    for phase, host_s in HOST_OF_BLOCK_S.items():
        if time.shortest_block_s[phase] < host_s:
            return (
                f"a compiled block's {phase} may take the host longer than the GPU, in small "
                f"micro-batches: up to {1e3 * host_s:.1f} ms were measured with FSDP, and how long "
                "it takes is not foretold"
            )
    return ""


RankBytes = Callable[[RunConfig, Layout], int]
"""Bytes of the fullest rank of a layout, or a bound of them."""


def layout_bytes(
    config: RunConfig, layout: Layout, links: Links, rank_bytes: RankBytes = fullest_rank_bytes
) -> int | str:
    """Bytes of the tensors of the fullest rank of such a step, which take less long to foretell
    than its time; or the reason why neither is foretold.
    """
    try:
        if reason := why_unknown(config) or misfit(config, layout):
            return reason
        if layout.gpus > links.gpus_per_node and links.network_bytes_per_s is None:
            return f"{layout.gpus} GPUs need several nodes, whose network is not known"
        return rank_bytes(config, layout)
    except DepthError as error:
        return str(error)


def least_gpu_s(config: RunConfig, curves: Curves, links: Links, recipe: Recipe | None) -> float:
    """Seconds of a GPU that kernels take for a sequence in the fastest of all layouts, whether they
    fit or not; 0 if none is foretold. No layout takes less, as other ranks only add to that.
    """
    times_s = []
    for layout in rank_layouts(config, links):
        # shards make experts' matmuls faster
        rank = Rank(config=config, layout=replace(layout, fp8=recipe, shard=2, stage=1))
        try:
            compute_s = layout_time(rank, curves, links).compute_s
        except DepthError:
            return 0.0
        times_s.append(compute_s * layout.gpus / layout.global_batch)
    return min(times_s, default=0.0)


def sequence_flops(config: RunConfig) -> int:
    """Model FLOPs of a training step of one sequence: of any model three times those of forward,
    as its blocks launch them, attention in full.
    """
    alone = replace(config.alone, batch_size=1, accumulate_steps=1, checkpoint_blocks=0)
    counted = step_flops(alone)
    return _traced_flops(alone) if counted is None else counted


@lru_cache(maxsize=64)
def _traced_flops(alone: RunConfig) -> int:
    """The same, of a model whose operations are known by its tapes."""
    maker, kinds = OperationMaker(Names(axes(alone))), blocks_of_model(alone).kinds

    def flops(keys: Iterable[OperationKey]) -> int:
        """FLOPs of the matmuls among these operations."""
        made = (getattr(maker, make)(*arguments) for _, make, *arguments in keys)
        return sum(map(flops_of, made))

    of_kinds = []
    for kind in range(max(kinds) + 1):
        of_kinds.append(flops(step_by_depth(alone, kind).launches[Phase.FORWARD].block))
    of_one = flops(step_by_depth(alone).launches[Phase.FORWARD].of_one)
    return 3 * (of_one - of_kinds[0] + sum(of_kinds[kind] for kind in kinds))


def why_refused(config: RunConfig) -> str:
    """Which setting of a step makes that no layout is foretold; empty if none does."""
    if config.mode is not Mode.TRAIN:
        return f"a layout is one of training, got mode {config.mode}"
    is_fused = config.model_factory is not None or config.model.attention is Attention.SDPA
    if config.optimizer is not OptimizerKind.FUSED or not is_fused:
        return "layouts are foretold for the fused optimizer and fused attention"
    if reason := _why_not_compiled(config):
        return reason
    if config.precision is Precision.FP16:
        return "precision fp16 has a gradient scaler that waits for the device; use bf16"
    return ""


def _why_not_compiled(config: RunConfig) -> str:
    """Why no layout of compiled blocks is foretold; empty if layouts are, or are eager."""
    if config.compile is CompileMode.NONE:
        return ""
    if config.compile is not CompileMode.DEFAULT:
        return f"only --compile default is foretold, and --compile {config.compile} is asked for"
    if not config.compile_blocks:
        return "ranks compile blocks one by one, and not the whole model: add --compile-blocks"
    return ""


def why_unknown(config: RunConfig) -> str:
    """Why no layout of a step is foretold; empty if layouts are."""
    if reason := why_refused(config):
        return reason
    if uncompiled(config) != config.without_shortcuts:
        return "layouts are foretold of steps without shortcuts"
    one = uncompiled(of_depth(config.alone, 1))
    if not is_predictable(one):
        return why_untraced(one) or "the step has settings whose memory is not foretold"
    if has_convolutions(one):
        return NO_CONVOLUTIONS
    return ""
