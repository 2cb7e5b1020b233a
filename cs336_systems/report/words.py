"""How tables and pictures say the settings and the end of a run."""

from collections.abc import Collection, Sequence

import pandas as pd

from cs336_systems.config import SETTINGS, Mode, RunConfig
from cs336_systems.record import Status
from cs336_systems.report.frame import rows_of
from cs336_systems.report.identity import SHAPE, identities, setting_of, usual_settings
from cs336_systems.settings import in_note

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
FIRST = ("device_name", "arch", "batch_size", "mode", "precision", "attention", "compile", "optimizer", "warmup_steps",
         "measured_steps")  # fmt: skip
"""Settings that notes begin with, in order; the others follow as they are declared."""
NOTED = tuple(dict.fromkeys((*FIRST, *(name for name, setting in SETTINGS.items() if setting.note))))
"""Settings that notes have words of their own for."""
ALWAYS = ("device_name", "arch", "batch_size", "mode", "precision", "attention", "optimizer", "warmup_steps",
          "measured_steps")  # fmt: skip
"""Settings that are said even where they are what they usually are."""
NEVER = ("size", *SHAPE, "context_length", "profiler", "repeat", "device", "digest")
"""What is said elsewhere: beside each row, or along an axis."""


def describe(frame: pd.DataFrame, also: Collection[str] = ()) -> str:
    """The settings that all rows of the frame of results share; see `shared_settings`."""
    return shared_settings([(row["config"], row["device_name"]) for row in rows_of(frame)], also)


def shared_settings(runs: Sequence[tuple[RunConfig, str | None]], also: Collection[str] = ()) -> str:
    """The settings that all runs, each with the name of its device, share, in words.

    Those that are as usual are not said, unless they are `also` wanted.
    """
    rows, usual = identities(runs), [usual_settings(config) for config, _ in runs]
    names = [name for name in dict.fromkeys((*NOTED, *(rows[0] if rows else ()))) if name not in NEVER or name in also]
    trains = any(config.mode is Mode.TRAIN for config, _ in runs)
    said = []
    for name in names:
        values = {row[name] for row in rows} - {None}
        is_unusual = any(row[name] != other.get(name) for row, other in zip(rows, usual, strict=True))
        is_wanted = (is_unusual or name in ALWAYS) and (trains or name != "optimizer")
        said += [in_note(name, setting_of(name), *values)] if len(values) == 1 and (is_wanted or name in also) else []
    return ", ".join(said)
