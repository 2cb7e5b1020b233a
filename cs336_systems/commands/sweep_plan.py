"""Which runs of a grid come first, which will not fit, and what is predicted of each."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..config import Device, Profiler, RunConfig
from ..costs.curves import Curves
from ..costs.fast_memory import FastMemory
from ..costs.fit import fits, host_bytes, needs_tape, outside_bytes
from ..costs.memory import predict_memory, predicted_peak_bytes
from ..costs.ranks_time import predicted_time
from ..costs.time import prepare_forecasts
from ..measure.environment import lacking_memory
from ..report.words import DOUBT, significant
from ..text import counted, print_line


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Configurations in the order to run them, and those that will not fit."""

    configs: tuple[RunConfig, ...]
    """Configurations by predicted peak, the smallest first; those predicted not to fit are last."""
    too_large: tuple[RunConfig, ...]
    """Configurations that are predicted to run out of memory."""


def make_plan(
    configs: Sequence[RunConfig], memory_bytes: int | None, *, of_users: bool = False
) -> Plan:
    """Order `configs` by predicted peak, and find those that do not fit `memory_bytes` of their
    device.

    Memory that is not known is None. It is predicted only without shortcuts. So a configuration
    with shortcuts, such as a compiled model, is ordered by the peak that it would have without
    them, and on a GPU it is never in `too_large`. Configurations without any prediction (on a CPU,
    and users' own models unless `of_users`, which traces them) follow in their given order.
    """
    wanted = [*configs, *(config.without_shortcuts for config in configs)]
    too_large = set()
    if memory_bytes is not None:  # a tape is that of a GPU
        of_hosts = [config for config in configs if needs_tape(config, memory_bytes)]
        wanted += [replace(config, device=Device.CUDA) for config in of_hosts]
    prepare_forecasts(wanted, of_users=of_users)
    if memory_bytes is not None:
        too_large = {config for config in configs if _is_too_large(config, memory_bytes)}
    peaks = {config: predicted_peak_bytes(config.without_shortcuts) for config in configs}

    def order(config: RunConfig) -> tuple[bool, bool, int]:
        """Sort key of a configuration: those that fit come first, those without a prediction after
        the others, and smaller peaks of memory before larger ones.
        """
        peak_bytes = peaks[config]
        return config in too_large, peak_bytes is None, peak_bytes or 0

    ordered = sorted(configs, key=order)
    last = tuple(config for config in ordered if config in too_large)
    return Plan(configs=tuple(ordered), too_large=last)


def _is_too_large(config: RunConfig, memory_bytes: int) -> bool:
    """Whether the step is predicted not to fit the memory of its device."""
    if config.device is Device.CPU:
        return (host_bytes(config, memory_bytes) or 0) > memory_bytes
    prediction = predict_memory(config)
    if prediction is None or prediction.reserved_bytes is None:
        return False
    if prediction.reserved_bytes + outside_bytes(config) <= memory_bytes:
        return False
    return fits(config, memory_bytes) is False


def print_plan(plan: Plan, directory: Path, curves: Curves | None) -> None:
    """Print a line for each run: its predicted peak and, by the ceilings, its predicted time; then
    those that will not fit, and how many runs there are.
    """
    doubt = f" {DOUBT}" if curves is not None and curves.is_in_doubt else ""
    for config in plan.configs:
        # a profiler makes steps longer, and a run that does not fit ends in none
        has_no_time = config.profiler is not Profiler.NONE or config in plan.too_large
        time = None if curves is None or has_no_time else predicted_time(config, curves)
        step = ""
        if time is not None:
            step = f", predicted step {significant(1e3 * time.step_s)} ms{doubt}"
        print(
            f"{config.key}: {config.label}, {config.warmup_steps} + {config.measured_steps} "
            f"steps{step}{_predicted(config)}"
        )
    for config in plan.too_large:
        print(f"will not fit: {config.label} {outlook(config)}")
    print_line(f"{counted(len(plan.configs), 'run')} into {directory}")


def outlook(config: RunConfig) -> str:
    """In words, what happens if a run is started although its memory does not suffice: a GPU fails
    at once, and a machine would hardly answer any more.
    """
    if (lacking := lacking_memory(config)) is not None:
        return f"is not run, and gets a row that says so: it {lacking}"
    return f"exceeds this GPU's memory, and comes last{_predicted(config)}"


def _predicted(config: RunConfig) -> str:
    """The predicted peak of memory of a step in words; with `--fast` it is computed in closed form,
    without the allocator's rounding.
    """
    peak_bytes = predicted_peak_bytes(config)
    about = ""
    is_fused = config.fused_blocks and config.fused_loss
    if peak_bytes is None and is_fused and config.mode.has_backward:
        peak_bytes, about = FastMemory(config).peak_bytes, "about "
    if peak_bytes is None:
        return ""
    return f", predicted peak {about}{peak_bytes / 2**30:.1f} GiB"
