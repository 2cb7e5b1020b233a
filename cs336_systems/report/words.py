"""How tables and pictures say the settings and the end of a run."""

import pandas as pd

from cs336_systems.config import Mode
from cs336_systems.record import Status

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
}
"""How to say a setting that all rows share; one that varies has a column, or a picture, of its own."""


def describe(frame: pd.DataFrame) -> str:
    """The settings that all rows share, in words, without those that say nothing."""
    unsaid = {("compile", "none"), ("world_size", 1)}
    if Mode.TRAIN not in set(frame["mode"]):
        unsaid |= {("optimizer", kind) for kind in frame["optimizer"]}
    shared = {name: frame[name].dropna().unique() for name in SETTINGS}
    return ", ".join(
        SETTINGS[name].format(values[0])
        for name, values in shared.items()
        if len(values) == 1 and (name, values[0]) not in unsaid
    )
