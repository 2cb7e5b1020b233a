"""The order of a sweep's runs, and which of them will run out of memory, predicted before anything runs."""

from collections.abc import Sequence
from dataclasses import dataclass

from cs336_systems.config import Device, RunConfig
from cs336_systems.costs.memory import fits, host_bytes, outside_bytes, predict_memory, predicted_peak_bytes
from cs336_systems.costs.time import prepare_forecasts


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Configurations in the order to run them, and those that will not fit."""

    configs: tuple[RunConfig, ...]
    """Configurations by predicted peak, the smallest first; those predicted not to fit are last."""
    too_large: tuple[RunConfig, ...]
    """Configurations that are predicted to run out of memory."""


def make_plan(configs: Sequence[RunConfig], memory_bytes: int | None, *, of_users: bool = False) -> Plan:
    """Order `configs` by predicted peak, and find those that do not fit `memory_bytes` of their device.

    Memory that is not known is None. It is predicted only without shortcuts. So a configuration with shortcuts, such as
    a compiled model, is ordered by the peak that it would have without them, and on a GPU it is never in `too_large`.
    Configurations without any prediction (on a CPU, and users' own models unless `of_users`, which traces them) follow
    in their given order.
    """
    wanted = [each for config in configs for each in (config, config.without_shortcuts)]
    prepare_forecasts(wanted, of_users=of_users)
    too_large = {config for config in configs if memory_bytes is not None and _is_too_large(config, memory_bytes)}
    peaks = {config: predicted_peak_bytes(config.without_shortcuts) for config in configs}
    ordered = sorted(configs, key=lambda config: (config in too_large, peaks[config] is None, peaks[config] or 0))
    return Plan(configs=tuple(ordered), too_large=tuple(config for config in ordered if config in too_large))


def _is_too_large(config: RunConfig, memory_bytes: int) -> bool:
    if config.device is Device.CPU:
        return (host_bytes(config) or 0) > memory_bytes
    found = predict_memory(config)
    if found is None or found.reserved_bytes + outside_bytes(config) <= memory_bytes:
        return False
    return fits(config, memory_bytes) is False
