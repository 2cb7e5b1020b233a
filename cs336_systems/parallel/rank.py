"""Who a process is among the ranks of a run, and where they meet. Without torch, so that commands can read it."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One of the processes that share each step of a run."""

    rank: int
    """From 0."""
    ranks: int
    meeting: str
    """Where they meet, as torch.distributed wants it: a file that none of them has made yet."""
    timeout_s: float = 600.0
    """How long a collective waits for the other ranks."""


def devices_of(rank: int, gpu_uuids: Sequence[str], *, all_of_them: bool) -> str:
    """Value of CUDA_VISIBLE_DEVICES for a rank: its own GPU, which comes first, and the others if it writes to them."""
    own = gpu_uuids[rank]
    return ",".join([own, *(uuid for uuid in gpu_uuids if uuid != own)]) if all_of_them else own
