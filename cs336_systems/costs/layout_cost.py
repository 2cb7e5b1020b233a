"""What a step of a layout takes: memory, time, and of what the time consists; or why neither is
foretold.
"""

from dataclasses import dataclass, replace

from ..config import Attention, Mode, OptimizerKind, Precision, RunConfig
from .accounting import step_flops
from .curves import Curves
from .depth import DepthError, has_step_by_depth, of_depth
from .layout import Layout, misfit
from .layout_memory import Rank, fullest_rank_bytes
from .layout_time import LayoutTime, layout_time
from .memory import is_predictable
from .ranks_time import Links


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutCost:
    """The forecast of a step of a layout."""

    layout: Layout
    time: LayoutTime
    peak_bytes: int
    """Tensors of the fullest rank."""
    flops: int | None
    """Model FLOPs of the step on all ranks together; None if they are not known."""

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.time.step_s

    @property
    def gpu_flops_per_s(self) -> float | None:
        """Model FLOPs that each GPU computes in a second."""
        return None if self.flops is None else self.flops / self.layout.gpus / self.step_s


def layout_cost(
    config: RunConfig, layout: Layout, curves: Curves, links: Links
) -> LayoutCost | str:
    """The cost of a training step of a layout on GPUs that have these curves, joined by these
    links; or the reason why it is not foretold.

    `config` is the step in one process: its batch size and checkpoints are the layout's instead.
    """
    if reason := why_unknown(config) or misfit(config, layout):
        return reason
    if layout.gpus > links.gpus_per_node and links.network_bytes_per_s is None:
        return f"{layout.gpus} GPUs need several nodes, whose network is not known"
    rank = Rank(config=config, layout=layout)
    if not has_step_by_depth(rank.alone):
        return "the step of one block cannot be traced"
    try:
        of_sequence = step_flops(replace(config, batch_size=1))
        return LayoutCost(
            layout=layout,
            time=layout_time(rank, curves, links),
            peak_bytes=fullest_rank_bytes(config, layout),
            flops=None if of_sequence is None else layout.global_batch * of_sequence,
        )
    except DepthError as error:
        return str(error)


def why_refused(config: RunConfig) -> str:
    """Which setting of a step makes that no layout is foretold; empty if none does."""
    if config.mode is not Mode.TRAIN:
        return f"a layout is one of training, got mode {config.mode}"
    if config.model_factory is not None:
        return "layouts of a model of your own are not foretold"
    if config.optimizer is not OptimizerKind.FUSED or config.model.attention is not Attention.SDPA:
        return "layouts are foretold for the fused optimizer and fused attention"
    if config.precision is Precision.FP16:
        return "precision fp16 has a gradient scaler that waits for the device; use bf16"
    return ""


def why_unknown(config: RunConfig) -> str:
    """Why no layout of a step is foretold; empty if layouts are."""
    if reason := why_refused(config):
        return reason
    if config != config.without_shortcuts or not is_predictable(of_depth(config.alone, 1)):
        return "the step has settings whose memory is not foretold"
    return ""
