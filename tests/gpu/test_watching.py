"""Each kind of run under each watcher, on a real GPU: all end well, and both profilers book the
same kernels.
"""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import numpy as np
import pytest
import torch

from cs336.analysis.kernels.phases import LaunchPhase
from cs336.analysis.kernels.step_profile import decode_profile
from cs336.config import (
    EAGER_STEPS_BEFORE_GRAPH,
    Arch,
    CompileMode,
    Device,
    Mode,
    ModelConfig,
    OptimizerKind,
    Precision,
    Profiler,
    RunConfig,
)
from cs336.model.fast.choose import fastest
from cs336.record import Status, load_records, write_record
from cs336.sweep.keep import can_be_explained, explain_run
from cs336.sweep.store import explanation_path
from cs336.sweep.worker import run_here

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

MODEL = ModelConfig(
    vocab_size=512, context_length=64, d_model=128, d_ff=256, num_layers=2, num_heads=2
)
CONFIG = RunConfig(
    size="custom",
    model=MODEL,
    device=Device.CUDA,
    warmup_steps=EAGER_STEPS_BEFORE_GRAPH + 1,
    measured_steps=2,
)
BLOCKS = {"compile": CompileMode.DEFAULT, "compile_blocks": True}
EAGER = {
    "eager": CONFIG,
    "gpt2": replace(CONFIG, model=replace(MODEL, arch=Arch.GPT2)),
    "checkpoint": replace(CONFIG, checkpoint_blocks=1),
    "checkpoint of two, bf16": replace(CONFIG, checkpoint_blocks=2, precision=Precision.BF16),
    "fp16": replace(CONFIG, precision=Precision.FP16),
    "tokens": replace(CONFIG, tokens="tokens.npy"),
    "inference": replace(CONFIG, mode=Mode.INFERENCE),
}
"""Kinds of run whose modules have ranges of their own, in backward too."""
OTHERS = {
    "compiled": replace(CONFIG, compile=CompileMode.DEFAULT),
    "compiled, reduce-overhead": replace(CONFIG, compile=CompileMode.REDUCE_OVERHEAD),
    "compiled by block": replace(CONFIG, **BLOCKS),
    "compiled by block, checkpoint": replace(CONFIG, **BLOCKS, checkpoint_blocks=1),
    "graph": replace(CONFIG, optimizer=OptimizerKind.FUSED, cuda_graph=True),
    "fast": CONFIG,
    "course's model": replace(CONFIG, model_factory="tests.own_models:BasicsTransformerLM"),
    "own model": replace(CONFIG, model_factory="tests.own_models:Uneven"),
}


def run_all(configs, runs):
    for config in configs:
        record = run_here(config, runs)
        write_record(record, runs)
        if can_be_explained(record, runs):
            explain_run(config, runs)


def watched(config, folder):
    """What the profilers of kernels saw, in fresh processes: torch.profiler slows the launches
    of its own for good.
    """
    if config.tokens is not None:
        np.save(folder / config.tokens, np.arange(1_000, dtype=np.uint16) % MODEL.vocab_size)
        config = replace(config, tokens=str(folder / config.tokens))
    # a replay allocates nothing
    watchers = [p for p in Profiler if not (config.cuda_graph and p is Profiler.MEMORY)]
    configs, runs = [replace(config, profiler=profiler) for profiler in watchers], folder / "runs"
    runs.mkdir()
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        process.submit(run_all, configs, runs).result()
    records = {record.config.profiler: record for record in load_records(runs)[0]}
    assert set(records) == set(watchers)
    for profiler, record in records.items():
        assert record.status is Status.OK, (profiler, record.failure)
    return {
        watched.profiler: decode_profile(explanation_path(watched, runs).read_bytes())
        for watched in configs
        if watched.profiler in (Profiler.KINETO, Profiler.NSYS)
    }


def launches(profile):
    return {phase.phase: set(phase.launches) for phase in profile.phases if any(phase.launches)}


@pytest.mark.parametrize("kind", [*EAGER, *OTHERS])
def test_all_watchers_see_the_same_run(kind, tmp_path):
    config = (EAGER | OTHERS)[kind]
    if kind == "fast":
        config = fastest(config, torch.cuda.get_device_name())
        assert config.compile_blocks
        assert config.cuda_graph
    seen = watched(config, tmp_path)
    phases = {LaunchPhase(phase.value) for phase in config.phases}
    for profile in seen.values():
        assert phases <= set(launches(profile)) | {LaunchPhase.DATA}
        assert LaunchPhase.UNATTRIBUTED not in launches(profile)
        if kind in EAGER:
            check_modules(profile, config)
    assert launches(seen[Profiler.NSYS]) == launches(seen[Profiler.KINETO])


def check_modules(profile, config):
    """The modules of each phase are all there, and no range stands inside one that should have
    been closed.
    """
    blocks = {
        (f"block.{index}", part)
        for index in range(MODEL.num_layers)
        for part in ("norm", "attention", "ffn")
    }
    around = {(), *((block,) for block, _ in blocks)}
    of_attention = {
        (*path, f"attention.{part}") for path in blocks for part in ("scores", "softmax", "values")
    }
    of_attention = {path for path in of_attention if path[1] == "attention"}
    modules = {("embedding",), ("norm",), ("lm_head",), *blocks}
    again = (
        {("forward", *path) for path in around | blocks | of_attention}
        if config.checkpoint_blocks
        else set()
    )
    for phase in (LaunchPhase.FORWARD, LaunchPhase.BACKWARD):
        paths = {module.path for module in profile.modules if module.phase is phase}
        if not paths:
            assert phase.value not in config.phases
        elif phase is LaunchPhase.FORWARD:
            assert modules | of_attention <= paths
            assert paths <= modules | of_attention | around | {("loss",)}
        else:
            assert modules <= paths
            # its kernels belong to the modules of their operators in forward
            assert paths <= modules | of_attention | around | again | {("loss",)}
    told = {phase.phase for phase in profile.phases if any(phase.recomputed_s)}
    assert told == ({LaunchPhase.BACKWARD} if config.checkpoint_blocks else set())
