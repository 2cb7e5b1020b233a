"""Rewrites the tapes that come with the program: `python -m tests.ship_traces`, after a change of
the step. `python -m tests.ship_traces missing` adds those that are missing, after new steps were
published, and `compiled` adds those of compiled steps.

Run it with PyTorch 2.11, by which the published records were measured: from 2.13 on autocast runs
RMSNorm in fp32, which the tapes of PyTorch's FSDP in bf16 would show.
"""

import itertools
import lzma
import sys
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import torch  # noqa: F401  so that this process traces, and not one for each step

from cs336.commands.plan import PlanArguments, _training
from cs336.config import (
    SIZES,
    Attention,
    CompileMode,
    Device,
    Mode,
    OptimizerKind,
    Parallel,
    Precision,
    RunConfig,
)
from cs336.costs import fast_layouts, traces
from cs336.costs.compiled import steps_to_compile, why_refused
from cs336.costs.compiled_blocks import steps_of_blocks
from cs336.costs.depth import of_depth
from cs336.costs.fast_layouts import fast_steps, timed_steps
from cs336.costs.layout import MAX_MICRO_BATCH, Layout, powers
from cs336.costs.layout_memory import Rank
from cs336.costs.memory import is_fast_step, is_predictable
from cs336.costs.shards import plain
from cs336.costs.time import steps_to_trace
from cs336.costs.traces import is_compiled
from cs336.model.fast.choose import fastest
from cs336.record import load_records
from tests.committed import committed_runs

DIGITS = "0123456789abcdef"
"""The digits with which names begin."""


def on_gpu(
    size: str, attention: Attention = Attention.NAIVE, context_length: int = 512, **settings: Any
) -> RunConfig:
    model = replace(SIZES[size], attention=attention, context_length=context_length)
    return RunConfig(size=size, model=model, device=Device.CUDA, **settings)


def shipped() -> Iterator[RunConfig]:
    """Steps whose tapes come with the program: measured ones, alone and shared; every preset at its
    common settings; what --fast and --fit ask first.
    """
    for runs in committed_runs():
        for record in load_records(runs)[0]:
            yield from (record.config, record.config.alone)
            if record.config.is_shared:
                yield plain(record.config)
    for size, attention, precision in itertools.product(SIZES, Attention, precisions()):
        for mode in Mode:
            yield on_gpu(size, attention, precision=precision, mode=mode)
        yield on_gpu(size, attention, precision=precision, batch_size=1)
        yield on_gpu(size, attention, context_length=1, precision=precision)
    for size in SIZES:
        yield on_gpu(size, Attention.SDPA, precision=Precision.BF16, optimizer=OptimizerKind.FUSED)
    yield from shallow()
    for size, precision in (
        ("tiny", Precision.FP32),
        ("small", Precision.FP32),
        ("xl", Precision.BF16),
    ):
        for batch_size, context_length in ((1, 512), (4, 1)):
            yield on_gpu(
                size, context_length=context_length, batch_size=batch_size, precision=precision
            )
    for size in ("small", "medium", "xl"):
        fast = fastest(on_gpu(size), "NVIDIA H100", lambda _: False)
        yield from (
            fast,
            replace(fast, fp8=True, fused_activations=False, bf16_stream=True),
            fast.without_shortcuts,
            replace(fast.without_shortcuts, checkpoint_blocks=1),
        )
    yield from of_fast_plans()
    yield on_gpu("10B")
    every = tuple(way for way in Parallel if way not in (Parallel.NONE, Parallel.OWN))
    for size, ways in {"small": every, "xl": every, "2.7B": (Parallel.FSDP,)}.items():
        for way, shards in itertools.product(ways, (False, True)):
            if not shards or (size, way) == ("small", Parallel.DDP_NAIVE):
                yield on_gpu(
                    size,
                    Attention.SDPA,
                    precision=Precision.BF16,
                    optimizer=OptimizerKind.FUSED,
                    parallel=way,
                    ranks=2,
                    shard_optimizer=shards,
                )


def of_fast_plans() -> Iterator[RunConfig]:
    """What `plan --fast` asks of presets on the GPUs of a node, for a step and for a training."""
    asked: list[RunConfig] = []

    def note(configs: Iterable[RunConfig]) -> None:
        """Note the steps of which a plan needs forecasts."""
        asked.extend(configs)

    for size, tokens in (("small", None), ("gpt2", None), ("8B", None), ("8B", 1e12)):
        arguments = PlanArguments(size=size, gpus="8xH100", fast=True, tokens=tokens)
        training = _training(arguments, arguments.config(), arguments.known_ceilings())
        assert training.fast is not None
        links = training.links
        steps, _ = fast_steps(training.fast, training.gpus, training.sequences, links, None)
        with mock.patch.object(fast_layouts, "_prepare", note):
            timed, _ = timed_steps(steps, training.memory_bytes, training.curves, links)
        asked += [step.config for step, _ in timed]
    for config in asked:
        yield from steps_to_trace(config)


def shallow() -> Iterator[RunConfig]:
    """One and two blocks, from which layouts of any depth follow (`costs/depth.py`)."""
    choices = itertools.product(("small", "gpt2"), precisions(), (0, 1), (1, 4), (1, 2))
    for size, precision, checkpoint_blocks, batch_size, blocks in choices:
        config = on_gpu(
            size,
            Attention.SDPA,
            precision=precision,
            optimizer=OptimizerKind.FUSED,
            checkpoint_blocks=checkpoint_blocks,
            batch_size=batch_size,
        )
        yield of_depth(config, blocks)
        if size == "small":  # with grouped queries
            model = replace(config.model, num_kv_heads=4)
            yield of_depth(replace(config, model=model), blocks)


def compiled() -> Iterator[RunConfig]:
    """Steps under torch.compile whose tapes come with the program: measured ones, presets, and the
    blocks that `plan` asks for.
    """
    for runs in committed_runs():
        for record in load_records(runs)[0]:
            if is_compiled(record.config) and not why_refused(record.config):
                yield record.config
    sizes = {
        Precision.FP32: ("small", "medium", "large", "xl"),
        Precision.BF16: ("small", "medium"),
    }
    for precision, names in sizes.items():
        for size in names:
            yield on_gpu(size, precision=precision, compile=CompileMode.DEFAULT)


def blocks_of_plans(size: str) -> Iterator[RunConfig]:
    """Shallow steps of compiled blocks from which `plan --compile default` foretells a preset."""
    config = PlanArguments(size=size, compile=CompileMode.DEFAULT).config()
    for micro_batch, checkpoint in itertools.product(powers(MAX_MICRO_BATCH), (0, 1)):
        layout = Layout(micro_batch=micro_batch, checkpoint=checkpoint)
        yield from steps_of_blocks(Rank(config=config, layout=layout).alone)


def precisions() -> tuple[Precision, ...]:
    return Precision.FP32, Precision.BF16


def wanted() -> dict[str, RunConfig]:
    """The steps by the names of their tapes."""
    steps = (step for step in shipped() if step.model_factory is None)
    return {
        traces._name(traces.traced_as(step)[0]): step
        for step in steps
        if is_predictable(step) or is_fast_step(step)
    }


def compiled_names() -> dict[str, RunConfig]:
    """The steps to compile for these, by the names of their tapes."""
    names = {}
    measured = (step for config in compiled() for step in steps_to_compile(config)[0])
    of_plans = (blocks_of_plans(size) for size in SIZES if size != "tiny")
    for step in itertools.chain(measured, *of_plans):
        names[traces.compiled_name(traces.compiled_as(step), traces.COMPILER)] = step
    return names


def main() -> None:
    """Trace all of these steps anew, and write the archive; or add those that are missing."""
    if sys.argv[1:] == ["compiled"]:
        add_compiled()
        return
    every = wanted()
    if sys.argv[1:] == ["missing"]:
        traces.prepare(step for name, step in every.items() if name not in shipped_names())
    else:
        traces._shipped.cache_clear()
        traces.SHIPPED.unlink(missing_ok=True)
        traces.prepare(every.values())
    write(traces.SHIPPED, every)


def add_compiled() -> None:
    """Compile the steps that are missing in the archive of compiled ones, and write it."""
    every = compiled_names()
    for step in every.values():
        (tape,) = traces.compiled_tapes([step])
        assert tape.compiler == traces.COMPILER, (step.label, tape.failure)
        print(step.label, flush=True)
    write(traces.SHIPPED_COMPILED, every)


def write(path: Path, names: Iterable[str]) -> None:
    """Write the tapes of these names, those together that begin with the same digit."""
    groups: dict[str, dict[str, msgspec.Raw]] = {digit: {} for digit in DIGITS}
    for name in sorted(names):
        kept = traces._kept(name)
        assert kept is not None
        tape = kept if kept.startswith(b"{") else lzma.decompress(kept)
        groups[name[0]][name] = msgspec.Raw(tape)
    with zipfile.ZipFile(path, "w") as archive:
        for digit, tapes in groups.items():
            archive.writestr(zipfile.ZipInfo(digit), lzma.compress(msgspec.json.encode(tapes)))


def shipped_names() -> set[str]:
    """The names of all tapes that come with the program."""
    return set(itertools.chain.from_iterable(map(traces._shipped, DIGITS)))


if __name__ == "__main__":
    main()
