"""Who a process is among the ranks of a run, and where they meet. Without torch, so that commands can read it."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FROM_ENVIRONMENT = "env://"
"""The meeting place of ranks that torchrun started: MASTER_ADDR and MASTER_PORT."""
_STARTED_BY_TORCHRUN = "TORCHELASTIC_RUN_ID"
_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One of the processes that share each step of a run."""

    rank: int
    """From 0."""
    ranks: int
    meeting: str
    """Where they meet, as torch.distributed wants it: a file that none of them has made yet, or FROM_ENVIRONMENT."""
    timeout_s: float = 600.0
    """How long a collective waits for the other ranks."""


def devices_of(rank: int, gpu_uuids: Sequence[str], *, all_of_them: bool) -> str:
    """Value of CUDA_VISIBLE_DEVICES for a rank: its own GPU, which comes first, and the others if it writes to them."""
    own = gpu_uuids[rank]
    return ",".join([own, *(uuid for uuid in gpu_uuids if uuid != own)]) if all_of_them else own


def rank_from_environment(environment: Mapping[str, str] | None = None) -> Rank | None:
    """The rank that torchrun gave this process; None if torchrun did not start it.

    Raises ValueError for ranks on several machines, and for variables that are no numbers.
    """
    found = os.environ if environment is None else environment
    if _STARTED_BY_TORCHRUN not in found or not all(name in found for name in _VARIABLES):
        return None  # schedulers set some of the variables too
    rank, local_rank, ranks, local_ranks = (_number(name, found[name]) for name in _VARIABLES[:4])
    if (rank, ranks) != (local_rank, local_ranks):
        raise ValueError(
            f"ranks must be processes of one machine, got WORLD_SIZE={ranks} of which {local_ranks} are here; "
            "use torchrun --nnodes 1"
        )
    return Rank(rank=rank, ranks=ranks, meeting=FROM_ENVIRONMENT)


def _number(name: str, text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"the environment variable {name}, which torchrun sets, must be a number, got {text!r}")
    return int(text)
