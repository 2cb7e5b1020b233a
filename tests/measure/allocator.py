"""The CUDA allocator's counters and history, made up, so that steps on a CPU can be recorded."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from cs336.measure import memory


def make_up_allocator(patch: pytest.MonkeyPatch) -> None:
    """As on a GPU, whose allocator counts something at every look; a snapshot is an empty file."""
    count = itertools.count(1)

    def counters() -> dict[str, Any]:
        num = next(count)
        sums = {"all": {"current": num, "peak": num}}
        return {"allocation": {"all": {"allocated": num, "freed": 0}}} | dict.fromkeys(
            ("allocated_bytes", "requested_bytes", "reserved_bytes"), sums
        )

    patch.setattr(memory, "_counters", counters)
    patch.setattr(torch.cuda.memory, "_record_memory_history", lambda *_, **__: None)
    patch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_bytes(b""))
    patch.setattr(torch.cuda, "mem_get_info", lambda: (1, 3))
    patch.setattr(torch.cuda, "current_device", lambda: 0)
