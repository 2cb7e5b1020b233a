"""How tables and pictures name the end of a run, and its mode."""

from cs336_systems.config import Mode
from cs336_systems.record import Status

STATUS_WORDS = {
    Status.OK: "ok",
    Status.UNAVAILABLE: "no kernel",
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


def status_text(status: str) -> str:
    """How a run, or a cell of a study, ended: `out of memory`."""
    return STATUS_WORDS[Status(status)]
