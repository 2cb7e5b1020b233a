"""Phases of a training step, in which kernels are launched."""

from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

Codes = NDArray[np.int8]
"""Phases as indices into `PHASES`."""


class LaunchPhase(StrEnum):
    """The part of a step in which a kernel was launched; each kernel has exactly one.

    A member's ranges are named in `PhaseNames` (ranges.py), which a user may change, or in
    `known_ranges.py`; its place here is its place in tables. How it looks and is called is in
    `report`: `LAUNCH_PHASES` (charts.py) and `WHERE` (sections/kernels/figures.py).
    """

    DATA = "data"
    FORWARD = "forward"
    LOSS = "loss"
    """Only where the loss stands beside forward; a `loss` range inside `forward` is part of
    forward.
    """
    BACKWARD = "backward"
    WEIGHT_GRADIENTS = "weight gradients"
    """Apart from the rest of backward, as pipelines schedule them; only where ranges say so."""
    COMMUNICATION = "communication"
    """Between backward and the optimizer, where ranks average gradients or wait until that is
    done.
    """
    OPTIMIZER = "optimizer"
    UNATTRIBUTED = "unattributed"


PHASES = tuple(LaunchPhase)
CODES = {phase: code for code, phase in enumerate(PHASES)}


class PhaseSource(StrEnum):
    """The evidence for the phases."""

    RANGES = "ranges"
    THREADS = "threads"
    NOTHING = "nothing"
