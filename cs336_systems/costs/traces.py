"""Finds the tape of a configuration's step, without torch: shipped with the program, in the user's
cache, or traced.

The tape of a plain step of this project's model names its sizes, so that it serves all sizes with
as many layers. All other steps, a user's own model among them, are traced with the very sizes that
were asked for. What no archive has is traced by a process of its own (`python -m
cs336.measure.traced`), once for each version of the program.
"""

import contextlib
import hashlib
import importlib
import json
import lzma
import os
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache, lru_cache
from math import prod
from pathlib import Path

import msgspec

from ..config import SETTINGS, Attention, CompileMode, Device, Precision, RunConfig
from ..files import user_cache, write_atomically
from ..settings import non_defaults
from ..text import counted, print_aside
from ..torch_needed import lacking_torch, require_torch, torch_version
from .tape import Tape, path_of

PACKAGE = Path(__file__).parents[1]
SHIPPED = Path(__file__).with_name("traces.zip")
"""Tapes of the published steps; `python -m tests.ship_traces` rewrites them. Those whose names
begin with the same digit are compressed together, as they are alike.
"""
SHIPPED_COMPILED = Path(__file__).with_name("compiled.zip")
"""Those of compiled steps; `python -m tests.ship_traces compiled` adds what is missing."""
COMPILER = "2.11.0"
"""Version of PyTorch that has compiled the steps whose tapes come with the program."""
TRACER = "cs336.measure.traced"
FORKING = "fork"
"""Argument of TRACER with which each step is traced by a process of its own."""
PRIMES = {
    "batch": 1009,
    "heads": 17,
    "kv_heads": 17,
    "group": 61,
    "group+1": 62,
    "T": 1013,
    "T+1": 1014,
    "vocabulary": 29,
    "d_ff": 8 * 23,
    "d_head": 8 * 19,
}
"""Sizes with which steps are traced, so that a product of them tells its factors; sizes of 1
stay, as views do then.
"""
BATCH_OF_BLOCKS = 61
"""Sequences with which blocks of a user's own model are traced: a prime, of which no usual size of
a model is a multiple.
"""
MAX_FLASH_WIDTH = 256
"""Largest width of a head that flash attention takes."""
MICRO_BATCHES = 2
"""Most micro-batches of a fast step that are traced."""
WITHOUT_COST = [name for name, setting in SETTINGS.items() if setting.without_cost]
"""Settings that change no operation and no tensor. Configurations that differ only in these
share one tape.
"""


def axes(config: RunConfig) -> dict[str, int]:
    """Sizes of the axes that occur in formulas; d_model is heads x d_head, and a batch is cut
    from T+1 tokens.
    """
    model = config.model
    heads = {"heads": model.num_heads}
    if model.num_kv_heads:
        group = model.num_heads // model.num_kv_heads
        # positions rotate the heads of queries together with their keys
        heads = {"kv_heads": model.num_kv_heads, "group": group, "group+1": group + 1}
    return {
        "batch": config.batch_size,
        **heads,
        "T": model.context_length,
        "T+1": model.context_length + 1,
        "vocabulary": model.vocab_size,
        "d_ff": model.d_ff,
        "d_head": model.d_head,
    }


@lru_cache(maxsize=4096)
def as_costed(config: RunConfig) -> RunConfig:
    """The configuration without the settings that change no forecast of a step."""
    return replace(config, size="").with_defaults(*WITHOUT_COST)


@lru_cache(maxsize=4096)
def traced_as(config: RunConfig) -> tuple[RunConfig, dict[str, int]]:
    """The configuration that is traced in place of this one, and the axes that can be told apart
    in its sizes.
    """
    config = replace(as_costed(config), device=Device.CUDA).without_graph
    if config.model_factory is not None:
        config = replace(config, compile=CompileMode.NONE)
        if not config.blocks:
            return config, {}
        return replace(config, batch_size=BATCH_OF_BLOCKS), {"batch": BATCH_OF_BLOCKS}
    model = replace(config.model, rope_theta=1.0)
    if config.precision is Precision.TF32:
        config = replace(config, precision=Precision.FP32)
    # fused attention takes only some widths of heads; the one that stands for all is such a width
    is_odd = model.attention is Attention.SDPA and (
        model.d_head % 8 > 0 or model.d_head > MAX_FLASH_WIDTH
    )
    # of a single head of keys the width is that of a head
    is_odd = is_odd or model.num_kv_heads == 1
    if config.fused_blocks:  # further micro-batches do what the last one does
        config = replace(config, accumulate_steps=min(config.accumulate_steps, MICRO_BATCHES))
    # kernels of the fast model are chosen by sizes, and ranks pad the parts of parameters
    if config != config.without_shortcuts or config.is_shared or is_odd:
        return replace(config, model=model), {}
    sizes = axes(config)
    sizes = sizes | {name: PRIMES[name] for name, size in sizes.items() if size > 1}
    num_heads = sizes["heads"] if not model.num_kv_heads else sizes["kv_heads"] * sizes["group"]
    model = replace(
        model,
        num_heads=num_heads,
        num_kv_heads=sizes["kv_heads"] if model.num_kv_heads else 0,
        context_length=sizes["T"],
        vocab_size=sizes["vocabulary"],
        d_ff=sizes["d_ff"],
        d_model=num_heads * sizes["d_head"],
    )
    return replace(config, batch_size=sizes["batch"], model=model), sizes


def tape_of(config: RunConfig) -> Tape:
    """The steps of a run until the steady state, of a configuration that has a tape."""
    require_tape(config)
    prepare([config])
    tape = _resized(_tape(config), tuple(axes(config).items()))
    assert tape.steps, f"{config.label} cannot be traced"
    return tape


def _tape(config: RunConfig) -> Tape:
    """The tape as it was traced; one without steps if it could not be, or was not yet."""
    kept = _kept(_name(traced_as(config)[0]))
    return Tape() if kept is None else _decoded(kept)


@lru_cache(maxsize=256)
def _resized(tape: Tape, sizes: tuple[tuple[str, int], ...]) -> Tape:
    """The tape of a step with other sizes of its axes; sizes of axes that it does not have are
    ignored.
    """
    known = {name: size for name, size in sizes if name in tape.axes}
    return msgspec.structs.replace(tape, axes=known)


def has_tape(config: RunConfig) -> bool:
    """Whether the step is traced, or can be: it is traced now if need be, but for the whole of a
    user's own model (`prepare`).
    """
    if config.model_factory is None or config.blocks:
        prepare([config])
    return is_at_hand(config)


def is_at_hand(config: RunConfig) -> bool:
    """Whether the tape is there without tracing."""
    return bool(_tape(config).steps)


def require_tape(config: RunConfig) -> None:
    """Raise TorchError if the step has to be traced, and no PyTorch that can do so is installed."""
    if not is_at_hand(config):
        require_torch(f"{config.label}: its tape does not come with the program; tracing the step")


def why_untraced(config: RunConfig) -> str:
    """What the attempt to trace the step has failed with; empty without a failure, or without an
    attempt.
    """
    return _tape(config).failure


def own_parameters(config: RunConfig) -> dict[str, int]:
    """Parameters of the modules of a user's own model by path, of a prepared configuration; {}
    if it is not made. A shared one counts where it comes first.
    """
    tape = _tape(config)
    counts = Counter[str]()
    for names, sides in tape.parameters:
        counts[path_of(names[0].rpartition(".")[0])] += prod(map(tape.names.size, sides))
    return dict(counts)


def idle_parameters(config: RunConfig) -> int | None:
    """Parameters of experts that a token does not choose; None of a step in which nothing is
    assumed of experts.
    """
    return _tape(config).idle_parameters


@lru_cache(maxsize=256)
def _decoded(kept: bytes) -> Tape:
    """The tape that is kept so, with one more step if the last one is in the steady state."""
    tape = Tape.from_json(kept if kept.startswith(b"{") else lzma.decompress(kept))
    if tape.steps and tape.is_steady:
        tape.repeat()
    return tape


def encoded(tape: Tape) -> bytes:
    """A tape as it is kept."""
    return lzma.compress(tape.to_json())


_traced: dict[str, bytes] = {}
"""Tapes that were traced for this process, by name."""


def _kept(name: str) -> bytes | None:
    """A tape as it is kept: by this process, in the archive, or in the cache.

    A damaged file of the cache counts as missing.
    """
    if name in _traced:
        return _traced[name]
    if (shipped := _shipped(name[0]).get(name)) is not None:
        return shipped
    try:
        kept = (_cache() / name).read_bytes()
        lzma.decompress(kept)  # compares its checksum
    except (OSError, lzma.LZMAError):
        return None
    return _traced.setdefault(name, kept)


@cache
def _shipped(digit: str) -> dict[str, bytes]:
    """The tapes that come with the program, as JSON by name, of which the names begin with this
    digit; empty if there are none.
    """
    tapes: dict[str, bytes] = {}
    for path in (SHIPPED, SHIPPED_COMPILED):
        if path.is_file():
            with zipfile.ZipFile(path) as archive:
                content = lzma.decompress(archive.read(digit))
            of_file = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
            tapes |= {name: bytes(tape) for name, tape in of_file.items()}
    return tapes


@lru_cache(maxsize=4096)
def _name(key: RunConfig) -> str:
    """File name of the tape of a configuration: a digest of all settings that are not at their
    defaults.
    """
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
    """Trace the steps of which no tape is at hand, and say on standard error which of them cannot
    be traced.

    Nothing is said of a user's own model that cannot be used: whoever asks has no forecast then,
    and no parameters.
    """
    untraced: dict[str, list[str]] = {}
    for config in trace_missing(configs):
        reason = why_untraced(config)
        if reason and (config.model_factory is None or own_parameters(config)):
            untraced.setdefault(reason, []).append(config.model_factory or config.label)
    for reason, (first, *others) in untraced.items():
        more = f" and {counted(len(others), 'other')}" if others else ""
        print_aside(f"{first}{more}: no forecast: {reason}")


def trace_missing(configs: Iterable[RunConfig]) -> list[RunConfig]:
    """Trace the steps of which no tape is at hand, all in one process.

    Return, of all configurations that share a newly traced tape, the first.
    """
    asked: Asked = {}
    missing: dict[str, RunConfig] = {}
    for config in configs:
        key, sizes = traced_as(config)
        if _kept(_name(key)) is None:
            asked[_name(key)] = key, sizes
            missing.setdefault(_name(key), config)
    if asked:
        _trace(asked)
    return [*missing.values()]


def _trace(asked: "Asked") -> None:
    """Trace steps, all in one process, and keep their tapes."""
    with one_tracer() as trace:
        for name, (key, sizes) in asked.items():
            _traced.update(trace({name: (key, sizes)}))
            # no file is written for a user's own model, whose code may change, or for a failure
            if key.model_factory is not None or not _decoded(_traced[name]).steps:
                continue
            with contextlib.suppress(OSError):  # without a cache it is traced again
                _cache().mkdir(parents=True, exist_ok=True)
                write_atomically(_cache() / name, _traced[name])


def is_compiled(config: RunConfig) -> bool:
    """Whether torch.compile runs when the step is traced. It does not for fused blocks, whose
    kernels are written by hand: it fuses next to nothing between them.
    """
    return config.compile is not CompileMode.NONE and not config.fused_blocks


def compiled_tapes(configs: Iterable[RunConfig]) -> list[Tape]:
    """The tapes of steps under torch.compile; one without steps says why it could not be traced.

    They have the very sizes that were asked for, because the compiler chooses by them. Its version
    is a part of their names: those that come with the program are of COMPILER, and others of the
    PyTorch that is installed.
    """
    asked: Asked = {}
    names = []
    for config in configs:
        key, name = _compiled_key(config)
        if _kept(name) is None:
            asked[name] = key, {}
        names.append(name)
    if asked:
        steps = counted(len(asked), "step")
        print_aside(f"compiling {steps} for a GPU that is not here: about 2 s for each")
        _trace(asked)
    tapes = []
    for name in names:
        kept = _kept(name)
        assert kept is not None
        tapes.append(_decoded(kept))
    return tapes


def is_compiled_at_hand(config: RunConfig) -> bool:
    """Whether the tape of a step under torch.compile is there without compiling."""
    _, name = _compiled_key(config)
    kept = _kept(name)
    return kept is not None and bool(_decoded(kept).steps)


def _compiled_key(config: RunConfig) -> tuple[RunConfig, str]:
    """The configuration that is compiled in place of this one, and the name of its tape."""
    key = compiled_as(config)
    name = compiled_name(key, COMPILER)
    if name not in _shipped(name[0]):
        installed = torch_version() or ""
        name = compiled_name(key, installed.partition("+")[0])
    return key, name


def compiled_as(config: RunConfig) -> RunConfig:
    """The configuration that is compiled in place of this one."""
    config = replace(as_costed(config), device=Device.CUDA).without_graph
    if config.precision is Precision.TF32:
        config = replace(config, precision=Precision.FP32)
    return replace(config, model=replace(config.model, rope_theta=1.0))


def compiled_name(key: RunConfig, compiler: str) -> str:
    """File name of the tape of a step that this version of PyTorch compiles."""
    return f"{_name(key)}-{compiler}"


Asked = dict[str, tuple[RunConfig, dict[str, int]]]
"""What is to be traced, by the name of its tape: the configuration, and the axes that can be
told apart in it.
"""
TraceSteps = Callable[[Asked], dict[str, bytes]]
"""Gives the tapes that are asked for, as they are kept."""
_open: list["_Tracer"] = []


@contextlib.contextmanager
def one_tracer() -> Iterator[TraceSteps]:
    """Let all that is traced in this block be traced by one process; by this one if it has torch
    anyway.
    """
    if lacking := lacking_torch():
        failure = encoded(Tape(failure=f"tracing the step {lacking}"))
        yield lambda asked: dict.fromkeys(asked, failure)
    elif _open:
        yield _open[0].trace
    elif "torch" in sys.modules:
        yield importlib.import_module(TRACER).trace_all
    else:
        with _opened(_Tracer()) as trace:
            yield trace


@contextlib.contextmanager
def traced_elsewhere() -> Iterator[None]:
    """Let all that is traced in this block be traced by another process, and each step by a copy of
    it, so that what a user's code keeps in its modules changes neither this process nor the next
    trace.
    """
    with _opened(_Tracer(FORKING)):
        yield


@contextlib.contextmanager
def _opened(tracer: "_Tracer") -> Iterator[TraceSteps]:
    """Let this process trace all that is traced in this block."""
    _open.append(tracer)
    try:
        yield tracer.trace
    finally:
        _open.pop().end()


class _Tracer:
    """A process that imports PyTorch and a user's code, and traces; it is started by the first step
    to trace.

    Questions and answers are lines on its standard input and output. What a user's code prints goes
    to standard error.
    """

    def __init__(self, *arguments: str) -> None:
        """`arguments` are those of TRACER."""
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None

    def trace(self, asked: Asked) -> dict[str, bytes]:
        """The tapes that are asked for; if the process ends instead, tapes that say so."""
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(msgspec.json.encode(asked) + b"\n")
            process.stdin.flush()
            return msgspec.json.decode(process.stdout.readline(), type=dict[str, bytes])
        except (OSError, msgspec.DecodeError):
            failure = f"the process that traced it ended with status {process.wait()}"
            self.end()
            return {name: encoded(Tape(failure=failure)) for name in asked}

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the process that traces steps."""
        # where this process finds modules, the other one does too
        places = os.pathsep.join(filter(None, sys.path))
        # in a session of its own, so that Ctrl-C reaches this process alone, which then ends the
        # other
        self._process = subprocess.Popen(
            [sys.executable, "-m", TRACER, *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": places},
            start_new_session=True,
        )
        return self._process

    def end(self) -> None:
        """End the process, if there is one; what a user's code would do at its end could take
        for ever.
        """
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(OSError):  # a question that was not sent
                self._process.communicate()
            self._process = None
