"""The command lines that measured the results of a directory, from what the records say."""

import shlex
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from cs336_systems.config import SETTINGS, Device, Profiler
from cs336_systems.record import RunRecord
from cs336_systems.report.frame import order
from cs336_systems.report.identity import settings_of, usual_settings
from cs336_systems.report.page.collection import Collection
from cs336_systems.settings import Setting, declared, flag_of
from cs336_systems.studies.attention_records import AttentionGrid

PROFILERS = {Profiler.NSYS: "--nsys", Profiler.KINETO: "--profile", Profiler.MEMORY: "--memory"}
ALWAYS = ("size", "context_length", "precision")
"""Settings that the command of a sweep names even where they have their usual values."""


def command_for(collection: Collection, directory: Path) -> str:
    """The command that measured the directory: of a sweep, or of a comparison of two configurations."""
    records = sorted(collection.sweeps[directory].records, key=lambda record: order(record.config))
    if (compared := collection.comparisons.get(directory)) is not None:
        sides = [compared.sides.a, compared.sides.b]
        repeats = len({record.config.repeat for record in records}) // 2
        words = ["cs336", "compare", *map(shlex.quote, sides), "--repeats", str(repeats)]
        return " ".join([*words, "--name", shlex.quote(directory.name)])
    return " ".join(["python benchmark_sweep.py", *_sweep_flags(records), "--name", shlex.quote(directory.name)])


def _sweep_flags(records: Sequence[RunRecord]) -> Iterator[str]:
    """The flags of a sweep over all values that these runs have of each setting."""
    configs = [record.config for record in records]
    profiled = [config for config in configs if config.profiler is not Profiler.NONE]
    if profiled:
        is_first = all((config.warmup_steps, config.measured_steps) == (0, 1) for config in profiled)
        is_first_step = is_first and profiled[0].profiler is Profiler.MEMORY
        yield "--memory-first-step" if is_first_step else PROFILERS[profiled[0].profiler]
    plain = [config for config in configs if config.profiler is Profiler.NONE] or configs
    values = [settings_of(config) for config in plain]
    usual = usual_settings(plain[0])
    for name, setting in SETTINGS.items():
        found = list(dict.fromkeys(_in_order([own[name] for own in values])))
        is_flag = bool(setting.help) and all(value is not None for value in found)
        if is_flag and name not in _SHAPE and (name in ALWAYS or found != [usual[name]]):
            yield _flag(name, setting, found)
    repeats = len({config.repeat for config in plain})
    if repeats > 1:
        yield f"--repeats {repeats}"


_SHAPE = ("d_model", "d_ff", "num_layers", "num_heads", "vocab_size", "arch")
"""Settings that follow from the size."""


def _in_order(values: Sequence[Any]) -> list[Any]:
    """The values in the order of their declaration, numbers in that of their size."""
    first = values[0]
    if isinstance(first, StrEnum):
        return sorted(values, key=list(type(first)).index)
    return sorted(values) if all(isinstance(value, int | float) for value in values) else list(values)


def _flag(name: str, setting: Setting, values: Sequence[Any]) -> str:
    """The flag of a sweep with its values; a switch without any."""
    flag = f"--{setting.plural.replace('_', '-')}" if setting.plural else flag_of(name, setting)
    if isinstance(values[0], bool):
        return flag if values[0] else f"--no-{flag.removeprefix('--')}"
    return " ".join([flag, *(shlex.quote(str(value)) for value in values)])


def attention_command(grid: AttentionGrid, directory: Path) -> str:
    """The command that measured a grid of attention."""
    words = ["cs336 attention"]
    on_gpu = grid.device is Device.CUDA
    for each, setting in declared(grid):
        value, usual = getattr(grid, each.name), each.default
        if setting.by_device is not None:
            usual = setting.by_device.gpu if on_gpu else setting.by_device.cpu
        if each.name == "implementations":
            value = tuple(name for name in value if name != "own")
        if setting.help and value != usual:
            values = value if isinstance(value, tuple) else (value,)
            words.append(_flag(each.name, setting, values))
    return " ".join([*words, "--name", shlex.quote(directory.name)])
