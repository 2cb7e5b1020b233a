"""How tables and pictures say the settings and the end of a run."""

from collections.abc import Collection, Mapping, Sequence

import pandas as pd

from cs336_systems.config import Mode, RunConfig
from cs336_systems.record import Status
from cs336_systems.report.frame import rows_of
from cs336_systems.report.identity import SHAPE, identities, usual_settings
from cs336_systems.setting_words import in_words, text_of

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
    "vocab_size": "vocabulary of {}",
    "rope_theta": "RoPE theta {}",
}
"""How to say a setting that all rows share, in order; one that varies has a column, or a picture, of its own."""
ALWAYS = ("device_name", "arch", "batch_size", "mode", "precision", "attention", "optimizer", "warmup_steps",
          "measured_steps")  # fmt: skip
"""Settings that are said even where they are what they usually are."""
NEVER = ("size", *SHAPE, "context_length", "profiler", "repeat", "device", "digest")
"""What is said elsewhere: beside each row, or along an axis."""
SPECIAL: Mapping[tuple[str, object], str] = {
    ("checkpoint_blocks", 0): "no checkpoints",
    ("checkpoint_blocks", 1): "a checkpoint every block",
    ("pad_vocabulary", 1): "vocabulary not padded",
}


def describe(frame: pd.DataFrame, also: Collection[str] = ()) -> str:
    """The settings that all rows of the frame of results share; see `shared_settings`."""
    return shared_settings([(row["config"], row["device_name"]) for row in rows_of(frame)], also)


def shared_settings(runs: Sequence[tuple[RunConfig, str | None]], also: Collection[str] = ()) -> str:
    """The settings that all runs, each with the name of its device, share, in words.

    Those that are as usual are not said, unless they are `also` wanted.
    """
    rows, usual = identities(runs), [usual_settings(config) for config, _ in runs]
    names = [
        name for name in dict.fromkeys((*SETTINGS, *(rows[0] if rows else ()))) if name not in NEVER or name in also
    ]
    trains = any(config.mode is Mode.TRAIN for config, _ in runs)
    said = []
    for name in names:
        values = {row[name] for row in rows} - {None}
        is_unusual = any(row[name] != other.get(name) for row, other in zip(rows, usual, strict=True))
        is_wanted = (is_unusual or name in ALWAYS) and (trains or name != "optimizer")
        said += [_said(name, *values)] if len(values) == 1 and (is_wanted or name in also) else []
    return ", ".join(said)


def _said(name: str, value: object) -> str:
    if (name, value) in SPECIAL:
        return SPECIAL[name, value]
    if name not in SETTINGS or value is False:
        return in_words(name, value)
    words = SETTINGS[name].format(text_of(value))
    return words.removesuffix("s") if value == 1 and name.endswith("_steps") else words
