"""What to run: all names that describe a run, its choices and its shape, for others to import.

The files of this folder declare the settings, grouped by subject; other modules import from here.
"""

from ..choices import (
    Arch,
    Attention,
    CompileMode,
    Device,
    LossKind,
    Mode,
    OptimizerKind,
    Parallel,
    Phase,
    Precision,
    Profiler,
    SdpaBackend,
)
from ..shapes import MAX_PARAMETERS, SIZES, ModelConfig
from .ranks import BUCKET_MIB, MAX_MEASURED_RANKS, MAX_RANKS
from .run import OF_SEVERAL_RANKS, SETTINGS, UNSIZED, USED_WITH, RunConfig
from .shortcuts import EAGER_STEPS_BEFORE_GRAPH, FLASH_4_HEADS, FP8_MULTIPLE, PACKED_MULTIPLE
from .step import MODULE_DEPTH

__all__ = (
    "BUCKET_MIB",
    "EAGER_STEPS_BEFORE_GRAPH",
    "FLASH_4_HEADS",
    "FP8_MULTIPLE",
    "MAX_MEASURED_RANKS",
    "MAX_PARAMETERS",
    "MAX_RANKS",
    "MODULE_DEPTH",
    "OF_SEVERAL_RANKS",
    "PACKED_MULTIPLE",
    "SETTINGS",
    "SIZES",
    "UNSIZED",
    "USED_WITH",
    "Arch",
    "Attention",
    "CompileMode",
    "Device",
    "LossKind",
    "Mode",
    "ModelConfig",
    "OptimizerKind",
    "Parallel",
    "Phase",
    "Precision",
    "Profiler",
    "RunConfig",
    "SdpaBackend",
)
