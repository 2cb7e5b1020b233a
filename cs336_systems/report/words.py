"""How tables and pictures say the settings and the end of a run."""

from dataclasses import fields

import pandas as pd

from cs336_systems.config import Mode, RunConfig
from cs336_systems.record import Status
from cs336_systems.report.frame import SHORTCUTS

STATUS_WORDS = {
    Status.OK: "ok",
    Status.OOM: "out of memory",
    Status.TIMEOUT: "timed out",
    Status.CRASHED: "crashed",
    Status.KILLED: "killed",
    Status.CUDA_ERROR: "CUDA error",
    Status.INVALID: "invalid record",
}
STEP_WORDS = {
    Mode.INFERENCE: "inference step",
    Mode.FORWARD: "forward pass",
    Mode.FORWARD_BACKWARD: "forward and backward pass",
    Mode.TRAIN: "training step",
}
SETTINGS = {
    "device_name": "{}",
    "arch": "{} architecture",
    "batch_size": "batch {}",
    "mode": "{}",
    "precision": "{}",
    "attention": "{} attention",
    "compile": "compile {}",
    "optimizer": "{} optimizer",
    "world_size": "{} processes",
    "warmup_steps": "{} warm-up steps",
    "measured_steps": "{} measured steps",
    "checkpoint_blocks": "a checkpoint every {} blocks",
    "pad_vocabulary": "vocabulary padded to a multiple of {}",
    "cast_once": "weights cast once",
    "fused_loss": "fused loss",
    "fused_blocks": "fused blocks",
    "fp8": "blocks in fp8",
    "cuda_graph": "each phase a CUDA graph",
    "learning_rate": "learning rate {}",
}
"""How to say a setting that all rows share; one that varies has a column, or a picture, of its own."""

_DEFAULTS = {field.name: field.default for field in fields(RunConfig)}


def describe(frame: pd.DataFrame) -> str:
    """The settings that all rows share, in words, without those that say nothing."""
    unsaid = {("compile", "none"), ("world_size", 1)} | {(name, _DEFAULTS[name]) for name in SHORTCUTS}
    if Mode.TRAIN not in set(frame["mode"]):
        unsaid |= {("optimizer", kind) for kind in frame["optimizer"]}
    shared = {name: frame[name].dropna().unique() for name in SETTINGS}
    return ", ".join(
        _said(name, values[0])
        for name, values in shared.items()
        if len(values) == 1 and (name, values[0]) not in unsaid
    )


def _said(name: str, value: object) -> str:
    if (name, value) == ("checkpoint_blocks", 1):
        return "a checkpoint every block"
    words = SETTINGS[name].format(value)
    return words.removesuffix("s") if value == 1 and name.endswith("_steps") else words
