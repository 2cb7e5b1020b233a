"""Which configuration a row is of, and what tells it from the others."""

from collections.abc import Sequence
from typing import Any

from cs336_systems.config import RunConfig
from cs336_systems.record import RunRecord
from cs336_systems.report.frame import COLUMNS, SHORTCUTS, rows_of, to_frame

IDENTITY = (*(name for name in COLUMNS[: COLUMNS.index("warmup_steps")] if name != "world_size"), *SHORTCUTS)
"""Columns of results.csv that say which configuration a row is of."""
_TOLD = ("mode", "precision", "batch_size", "attention", "compile", "optimizer", "arch", "device_name", "profiler",
         *SHORTCUTS)  # fmt: skip
"""Settings that have a column of their own where they vary."""
_SHAPE = ("d_model", "d_ff", "num_layers", "num_heads", "vocab_size")
_WORDS = {
    "context_length": "ctx {}",
    "batch_size": "batch {}",
    "repeat": "#{}",
    "checkpoint_blocks": "checkpoint {}",
    "pad_vocabulary": "padded to {}",
    "cast_once": "cast once {}",
    "fused_loss": "fused loss {}",
    "fused_blocks": "fused blocks {}",
    "fp8": "fp8 {}",
    "cuda_graph": "graph {}",
    "learning_rate": "lr {}",
    **{n: f"{n} {{}}" for n in _SHAPE},
}


def identity(config: RunConfig, record: RunRecord) -> dict[str, Any]:
    """The columns of results.csv that say which configuration it is, the profiler and the repeat."""
    row = rows_of(to_frame([record]))[0]
    return {name: row[name] for name in IDENTITY} | {"profiler": str(config.profiler), "repeat": config.repeat}


def telling(identities: Sequence[dict[str, Any]]) -> list[str]:
    """Columns that tell configurations apart: size and context, and what else varies; the shape only if it must."""
    names = ["size", "context_length", *(name for name in _TOLD if len({row[name] for row in identities}) > 1)]
    wanted = len({tuple(row.values()) for row in identities})
    for name in (*_SHAPE, "repeat"):
        if len({tuple(row[told] for told in names) for row in identities}) < wanted:
            names += [name] if len({row[name] for row in identities}) > 1 else []
    return names


def names_of(identities: Sequence[dict[str, Any]], *, without: Sequence[str] = ()) -> list[str]:
    """A few words for each, with what tells it from the others: `small ctx 128 bf16`."""
    told = [name for name in telling(identities) if name not in without]
    return [" ".join(_WORDS.get(name, "{}").format(row[name]) for name in told) for row in identities]
