"""The command lines that repeat a run, and those that measured the results of a directory, as the records say."""

import shlex
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from cs336_systems.config import SETTINGS, SIZES, Device, ModelConfig, Profiler, RunConfig
from cs336_systems.record import RunRecord
from cs336_systems.report.frame import order
from cs336_systems.report.identity import settings_of, usual_settings
from cs336_systems.report.page.collection import Climbed, Collection
from cs336_systems.settings import Setting, declared, flag_of
from cs336_systems.studies.ceilings_records import CeilingsGrid
from cs336_systems.sweep.ladder import gate_learning_rate, rungs

PROFILERS = {Profiler.NSYS: "--nsys", Profiler.KINETO: "--profile", Profiler.MEMORY: "--memory"}
NSYS = "nsys profile --capture-range=nvtx --nvtx-capture=measure"
"""Prefix of the command of a single run under nsys."""
ALWAYS = ("size", "context_length", "precision")
"""Settings that the command of a sweep names even where they have their usual values."""
RUN_ALWAYS = (*ALWAYS, "mode", "device")
"""Settings that the command of a single run names even where they have their usual values."""
LADDER_ALWAYS = ("size", "context_length", "batch_size")
LADDER_FLAGS = (*LADDER_ALWAYS, "vocab_size", "d_model", "d_ff", "num_layers", "num_heads", "model_factory",
                "warmup_steps", "measured_steps", "learning_rate", "tokens", "seed")  # fmt: skip
"""Settings that a ladder takes."""
LADDER_WARMUP = 10
"""Warm-up steps of a ladder by default."""
LAYER = " feed-forward"
"""Suffix, after the size, of the name of a layer's shape in a study of ceilings."""
MIB = 2**20


def command_of(config: RunConfig) -> str:
    """The command line of `benchmark.py` that makes this configuration again."""
    before = [NSYS] if config.profiler is Profiler.NSYS else []
    return " ".join([*before, "python benchmark.py", *_run_flags(config)])


def _run_flags(config: RunConfig) -> Iterator[str]:
    """The flags of what differs from the preset, or from the size `tiny` where the shape is no preset's."""
    size = config.size if config.size in SIZES else "tiny"
    preset, values = SIZES[size], settings_of(config) | {"size": size}
    is_first_step = _is_first_step([config])
    for part, usual in ((RunConfig, None), (ModelConfig, preset)):
        for each, setting in declared(part):
            name = each.name
            default = each.default if usual is None else getattr(usual, name)
            has_flag = bool(setting.help or setting.plural) or name == "device"
            is_chosen = is_first_step and name in ("warmup_steps", "measured_steps")
            is_named = name in RUN_ALWAYS or (name == "ranks" and config.is_shared)
            if has_flag and not is_chosen and (values[name] != default or is_named):
                yield _flag(flag_of(name, setting), [values[name]])
    if config.profiler in (Profiler.KINETO, Profiler.MEMORY):
        yield "--memory-first-step" if is_first_step else PROFILERS[config.profiler]


def _is_first_step(configs: Sequence[RunConfig]) -> bool:
    """Whether these runs record the memory of a first step."""
    steps = {(config.profiler, config.warmup_steps, config.measured_steps) for config in configs}
    return steps == {(Profiler.MEMORY, 0, 1)}


def command_for(collection: Collection, directory: Path) -> str:
    """The command that measured the directory, or that compared what others hold."""
    place = collection.place(directory)
    if (climbed := collection.ladders.get(directory)) is not None:
        return _named(["cs336 ladder", *_ladder_flags(climbed)], place)
    if (ceilings := collection.ceilings.get(directory)) is not None:
        return _named(["cs336 ceilings", *_ceilings_flags(ceilings.grid)], place)
    if (attention := collection.attention.get(directory)) is not None:
        return _named(["cs336 attention", *_grid_flags(attention.grid)], place)
    if (fusion := collection.fusion.get(directory)) is not None:
        return _named(["cs336 fusion", *_grid_flags(fusion.grid)], place)
    if directory in collection.precision:
        below = collection.root.resolve().name / directory
        return f"python precision.py --output {shlex.quote(str(below))}"
    if (compared := collection.comparisons.get(directory)) is not None:
        return _named(compared.words, place)
    return _sweep_command(collection, directory)


def _sweep_command(collection: Collection, directory: Path) -> str:
    place = collection.place(directory)
    group = place.parent.parent
    output = collection.root.resolve().name / group if group.parts else None
    return sweep_command(collection.sweeps[directory].records, place.name, output)


def sweep_command(records: Sequence[RunRecord], name: str, output: Path | None = None) -> str:
    """The command of a sweep of this name that measures what these records are of; `output` is None for the usual one.

    Several commands if some have a switch that others have not, as a sweep takes one value of a switch.
    """
    where = ["--output", shlex.quote(str(output))] if output else []
    ordered = sorted(records, key=lambda record: order(record.config))
    groups: dict[tuple[Any, ...], list[RunRecord]] = {}
    for record in ordered:
        settings = settings_of(record.config)
        switches = (value for name, value in settings.items() if isinstance(value, bool) and not SETTINGS[name].plural)
        groups.setdefault(tuple(switches), []).append(record)
    return " && ".join(
        " ".join(["python benchmark_sweep.py", *_sweep_flags(group), *where, "--name", shlex.quote(name)])
        for group in groups.values()
    )


def _sweep_flags(records: Sequence[RunRecord]) -> Iterator[str]:
    """The flags of a sweep over all values that these runs have of each setting."""
    configs = [record.config for record in records]
    profiled = [config for config in configs if config.profiler is not Profiler.NONE]
    if profiled:
        yield "--memory-first-step" if _is_first_step(profiled) else PROFILERS[profiled[0].profiler]
    plain = [config for config in configs if config.profiler is Profiler.NONE] or configs
    values = [(settings_of(config), usual_settings(config)) for config in plain]
    for name, setting in SETTINGS.items():
        own_values = [own[name] for own, _ in values]
        if name == "ranks":  # a sweep measures --parallel none on one rank whatever --ranks says
            own_values = [config.ranks for config in plain if config.is_shared] or own_values
        found = list(dict.fromkeys(_in_order(own_values)))
        is_flag = bool(setting.help) and all(value is not None for value in found)
        is_named = name in ALWAYS or (name == "ranks" and any(config.is_shared for config in plain))
        if is_flag and (is_named or any(own[name] != usual[name] for own, usual in values)):
            yield _flag(_plural(name, setting), found)
    repeats = len({config.repeat for config in plain})
    if repeats > 1:
        yield f"--repeats {repeats}"


def _in_order(values: Sequence[Any]) -> list[Any]:
    """The values in the order of their declaration, numbers in that of their size."""
    first = values[0]
    if isinstance(first, StrEnum):
        return sorted(values, key=list(type(first)).index)
    return sorted(values) if all(isinstance(value, int | float) for value in values) else list(values)


def _plural(name: str, setting: Setting) -> str:
    """The flag of a sweep or a study, which takes several values where a run has one."""
    return f"--{setting.plural.replace('_', '-')}" if setting.plural else flag_of(name, setting)


def _flag(flag: str, values: Sequence[Any]) -> str:
    """The flag with its values; a switch without any."""
    if isinstance(values[0], bool):
        return flag if values[0] else f"--no-{flag.removeprefix('--')}"
    return " ".join([flag, *(shlex.quote(str(value)) for value in values)])


def _grid_flags(grid: object) -> Iterator[str]:
    """The flags of a study for what its grid does not have by default."""
    for each, setting in declared(grid):
        value, usual = getattr(grid, each.name), each.default
        if setting.by_device is not None:
            usual = setting.by_device.gpu if getattr(grid, "device", None) is Device.CUDA else setting.by_device.cpu
        if each.name == "implementations":
            value = tuple(name for name in value if name != "own")
        if setting.help and value != usual:
            yield _flag(_plural(each.name, setting), value if isinstance(value, tuple) else (value,))
    if seed := getattr(grid, "seed", 0):
        yield f"--seed {seed}"


def _ceilings_flags(grid: CeilingsGrid) -> Iterator[str]:
    """The flags of a study of ceilings, with all sizes."""
    squares = [str(shape.rows) for shape in grid.shapes if shape.is_square]
    presets = [shape.name.removesuffix(LAYER) for shape in grid.shapes if shape.name.endswith(LAYER)]
    yield " ".join(["--sizes", *squares])
    yield " ".join(["--presets", *map(shlex.quote, presets)])
    yield " ".join(["--memory-mib", *(str(num_bytes // MIB) for num_bytes in grid.stream_bytes)])
    yield from _grid_flags(grid)


def _ladder_flags(climbed: Climbed) -> Iterator[str]:
    """The flags of a ladder: what the first rung does not have by default, and which rungs were run."""
    first = climbed.rungs[0].config
    usual = usual_settings(first) | {"warmup_steps": LADDER_WARMUP}
    usual["learning_rate"] = gate_learning_rate(first.model.d_model)
    for name, value in settings_of(first).items():
        if name in LADDER_FLAGS and (name in LADDER_ALWAYS or value != usual[name]):
            yield _flag(flag_of(name, SETTINGS[name]), [value])
    names = [rung.name for rung in climbed.rungs]
    device_name = next(filter(None, (record.device_name for record in climbed.results.records)), None)
    if names != [rung.name for rung in rungs(first, device_name)]:
        yield " ".join(["--rungs", *names])
    repeats = {record.config.repeat for record in climbed.results.published}
    yield f"--repeats {len(repeats) or 1}"
    if all(record.config.profiler is Profiler.NONE for record in climbed.results.records):
        yield "--no-reasons"


def _named(words: Sequence[str], directory: Path) -> str:
    return " ".join([*words, "--name", shlex.quote(directory.name)])
