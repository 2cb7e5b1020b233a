"""The command line that repeats a run."""

import shlex
from collections.abc import Iterator

from cs336_systems.config import SIZES, ModelConfig, Profiler, RunConfig
from cs336_systems.report.identity import settings_of
from cs336_systems.settings import declared, flag_of

ALWAYS = ("size", "context_length", "mode", "precision", "device")
"""Settings that the command line names even where they have their usual values."""
NSYS = "nsys profile --capture-range=nvtx --nvtx-capture=measure"


def command_of(config: RunConfig) -> str:
    """The command line of `benchmark.py` that makes this configuration again."""
    before = [NSYS] if config.profiler is Profiler.NSYS else []
    return " ".join([*before, "python benchmark.py", *_flags(config)])


def _flags(config: RunConfig) -> Iterator[str]:
    """The flags of what differs from the preset, or from the size `tiny` where the shape is no preset's."""
    size = config.size if config.size in SIZES else "tiny"
    preset, values = SIZES[size], settings_of(config) | {"size": size}
    is_first_step = config.profiler is Profiler.MEMORY and (config.warmup_steps, config.measured_steps) == (0, 1)
    for part, usual in ((RunConfig, None), (ModelConfig, preset)):
        for each, setting in declared(part):
            name = each.name
            default = each.default if usual is None else getattr(usual, name)
            has_flag = bool(setting.help or setting.plural) or name == "device"
            is_chosen = is_first_step and name in ("warmup_steps", "measured_steps")
            if not has_flag or is_chosen or (values[name] == default and name not in ALWAYS):
                continue
            flag, value = flag_of(name, setting), values[name]
            if isinstance(value, bool):
                yield flag if value else f"--no-{flag.removeprefix('--')}"
            else:
                yield f"{flag} {shlex.quote(str(value))}"
    if config.profiler is Profiler.KINETO:
        yield "--profile"
    if config.profiler is Profiler.MEMORY:
        yield "--memory-first-step" if is_first_step else "--memory"
