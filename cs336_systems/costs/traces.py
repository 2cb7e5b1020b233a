"""Finds the tape of a configuration's step, without torch: shipped with the program, in the user's cache, or traced.

A tape names its sizes, so one serves all sizes of a plain step with as many layers. What no archive has is traced by a
process of its own (`python -m cs336_systems.measure.traced`), once for each version of the program.
"""

import contextlib
import hashlib
import importlib
import json
import lzma
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path

import msgspec

from cs336_systems.config import Arch, CompileMode, Device, Precision, RunConfig
from cs336_systems.costs.shards import axes
from cs336_systems.costs.tape import Tape
from cs336_systems.files import user_cache, write_atomically
from cs336_systems.settings import non_defaults

PACKAGE = Path(__file__).parents[1]
SHIPPED = Path(__file__).with_name("traces.zip")
"""Tapes of the published steps; `python -m tests.ship_traces` rewrites them."""
TRACER = "cs336_systems.measure.traced"
PRIMES = {"batch": 1009, "heads": 17, "T": 1013, "T+1": 1014, "vocabulary": 29, "d_ff": 8 * 23, "d_head": 8 * 19}
"""Sizes with which steps are traced, so that a product of them tells its factors; sizes of 1 stay, as views do then."""
OWN_LENGTHS = (1013, 509, 251, 127, 61)
"""Contexts with which a user's own model is traced: the first that it surely takes, as a longer one was asked for."""
WITHOUT_COST = (
    "seed", "repeat", "learning_rate", "warmup_steps", "measured_steps", "sync_phases", "ranges", "tokens", "profiler",
    "module_depth",
)  # fmt: skip
"""Settings that change no operation and no tensor. Configurations that differ only in these share one tape."""


@lru_cache(maxsize=4096)
def as_costed(config: RunConfig) -> RunConfig:
    """The configuration without the settings that change no forecast of a step."""
    return replace(config, size="").with_defaults(*WITHOUT_COST)


@lru_cache(maxsize=4096)
def traced_as(config: RunConfig) -> tuple[RunConfig, dict[str, int]]:
    """The configuration that is traced in place of this one, and the axes that can be told apart in its sizes."""
    config = replace(as_costed(config), device=Device.CUDA).without_graph
    if config.model_factory is not None:
        length = next((prime for prime in OWN_LENGTHS if prime <= config.model.context_length), None)
        sizes = {"batch": PRIMES["batch"]} | ({} if length is None else {"T": length, "T+1": length + 1})
        return replace(config, compile=CompileMode.NONE), sizes
    model = replace(config.model, rope_theta=1.0)
    if config.precision is Precision.TF32:
        config = replace(config, precision=Precision.FP32)
    if config != config.without_shortcuts:  # kernels of the fast model are chosen by sizes
        return replace(config, model=model), {}
    own = axes(config)
    of_rank = {"batch"} if model.arch is Arch.GPT2 else {"batch", "T", "T+1"}  # parts of parameters are padded
    names = of_rank if config.is_shared else {*PRIMES}
    sizes = {name: PRIMES[name] if name in names and size > 1 else size for name, size in own.items()}
    model = replace(
        model, num_heads=sizes["heads"], context_length=sizes["T"], vocab_size=sizes["vocabulary"],
        d_ff=sizes["d_ff"], d_model=sizes["heads"] * sizes["d_head"],
    )  # fmt: skip
    return replace(config, batch_size=sizes["batch"], model=model), {name: sizes[name] for name in own if name in names}


def tape_of(config: RunConfig) -> Tape:
    """The steps of a run until the steady state, of a configuration that has a tape."""
    prepare([config])
    kept = _kept(_name(traced_as(config)[0]))
    assert kept, f"{config.label} cannot be traced"
    return _resized(kept, tuple(axes(config).items()))


@lru_cache(maxsize=256)
def _resized(kept: bytes, sizes: tuple[tuple[str, int], ...]) -> Tape:
    tape = _decoded(kept)
    return tape.resized({name: size for name, size in sizes if name in tape.names.axes})


def has_tape(config: RunConfig) -> bool:
    """Whether the step is traced, or can be: it is traced now if need be, but for a user's own model (`prepare`)."""
    if config.model_factory is None:
        prepare([config])
    return is_at_hand(config)


def is_at_hand(config: RunConfig) -> bool:
    """Whether the tape is there without tracing."""
    kept = _kept(_name(traced_as(config)[0]))
    if not kept or config.model_factory is None:
        return bool(kept)
    tape, sizes = _decoded(kept), axes(config)
    return bool(tape.steps) and all(sizes[name] == size for name, size in tape.exact.items())


def own_parameters(config: RunConfig) -> dict[str, int]:
    """Parameters of the modules of a user's own model by path, of a prepared configuration; {} if it is not made."""
    kept = _kept(_name(traced_as(config)[0]))
    return _decoded(kept).parameters if kept else {}


@lru_cache(maxsize=256)
def _decoded(kept: bytes) -> Tape:
    """The tape that is kept so, with one more step."""
    tape = Tape.from_json(json.loads(lzma.decompress(kept)))
    if tape.steps:
        tape.repeat()
    return tape


def encoded(tape: Tape) -> bytes:
    """A tape as it is kept."""
    text = json.dumps(tape.to_json(), separators=(",", ":")).encode()
    return lzma.compress(text)


_traced: dict[str, bytes] = {}
"""Tapes that were traced for this process, by name."""


def _kept(name: str) -> bytes | None:
    """A tape as it is kept: by this process, in the archive, or in the cache."""
    if name in _traced:
        return _traced[name]
    if (shipped := _shipped().get(name)) is not None:
        return shipped
    path = _cache() / name
    if not path.is_file():
        return None
    return _traced.setdefault(name, path.read_bytes())


@cache
def _shipped() -> dict[str, bytes]:
    if not SHIPPED.is_file():
        return {}
    with zipfile.ZipFile(SHIPPED) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@lru_cache(maxsize=4096)
def _name(key: RunConfig) -> str:
    if key.model_factory is not None:  # one tape serves all sizes of a batch, if the model takes them
        key = replace(key, batch_size=1, model=replace(key.model, context_length=1))
    chosen = json.dumps([non_defaults(key), non_defaults(key.model)], sort_keys=True)
    return hashlib.sha256(chosen.encode()).hexdigest()[:20]


@cache
def _cache() -> Path:
    """The user's cache of tapes that this version of the program has traced."""
    version = hashlib.sha256()
    for folder in ("model", "parallel", "measure", "costs"):
        for path in sorted((PACKAGE / folder).rglob("*.py")):
            version.update(path.read_bytes())
    return user_cache() / "traces" / version.hexdigest()[:16]


def prepare(configs: Iterable[RunConfig]) -> None:
    """Trace the steps of which no tape is at hand, all in one process; in this one if it has torch anyway."""
    longest_first = sorted(configs, key=lambda config: -config.model.context_length)  # the last of a name stays
    asked = {_name(key): (key, known) for key, known in map(traced_as, longest_first)}
    asked = {name: pair for name, pair in asked.items() if _kept(name) is None}
    if not asked:
        return
    if "torch" in sys.modules:
        made = importlib.import_module(TRACER).trace_all(asked)
    else:
        command = [sys.executable, "-m", TRACER]
        done = subprocess.run(command, input=msgspec.json.encode(asked), capture_output=True, check=False)
        if done.returncode:
            raise RuntimeError(f"tracing a step failed: {done.stderr.decode(errors='replace')[-2000:]}")
        sys.stderr.write(done.stderr.decode(errors="replace"))
        made = msgspec.json.decode(done.stdout, type=dict[str, bytes])
    _traced.update(made)
    with contextlib.suppress(OSError):  # without a cache they are traced again
        _cache().mkdir(parents=True, exist_ok=True)
        for name, data in made.items():
            if data and asked[name][0].model_factory is None:  # the code of others may change
                write_atomically(_cache() / name, data)


Asked = dict[str, tuple[RunConfig, dict[str, int]]]
"""What is to be traced, by the name of its tape: the configuration, and the axes that can be told apart in it."""
