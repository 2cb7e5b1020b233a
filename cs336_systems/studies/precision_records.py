"""The record of the precision study: sums and layer norm in low precision, and data types under autocast."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from cs336_systems.config import Device, Precision
from cs336_systems.studies.records import AT_LEAST_ONE, FORMAT_VERSION

MIXED_PRECISIONS = (Precision.FP16, Precision.BF16)
NORM_INPUT, NORM_OUTPUT = "layer norm's input", "layer norm's output (ln)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulation:
    """A number added up `count` times, one addition after the other."""

    sum_dtype: str
    addend_dtype: str
    cast: bool
    """Whether each addend was cast to the sum's type before it was added."""
    addend: float
    count: int
    total: float
    stored_addend: float
    """The addend as its type holds it."""
    growing_additions: int
    """Number of the last addition that changed the sum."""

    @property
    def exact(self) -> float:
        return self.addend * self.count

    @property
    def error(self) -> float:
        """The sum minus the exact sum."""
        return self.total - self.exact

    @property
    def storage_error(self) -> float:
        """The part of the error that an exact sum of the stored addends would have too."""
        return self.stored_addend * self.count - self.exact

    @property
    def rounding_error(self) -> float:
        """The part of the error that comes from rounding the sum after every addition."""
        return self.error - self.storage_error


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedDtype:
    """Data type of one quantity of a training step under autocast."""

    model: str
    device: Device
    precision: Precision
    quantity: str
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NormalisedActivations:
    """Activations `centre + scale` and `centre - scale`, in equal numbers, normalised in one data type throughout."""

    centre: float
    scale: float
    dtype: str
    variance: float | None
    """Variance as computed in the data type, of activations rounded to it; None beyond its range."""
    exact_variance: float
    """Variance as computed in fp64."""
    output: float | None
    """Normalised value of `centre + scale`, as computed in the data type; None beyond its range."""
    exact_output: float
    """Normalised value as computed in fp64."""
    library_output: float | None
    """Normalised value from torch.nn.functional.layer_norm, for activations in the data type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionStudy:
    """Everything kept of a study of precision."""

    WHAT: ClassVar[str] = "a study of precision"

    torch: str
    """Version."""
    gpu: str | None
    """Name of the GPU on which autocast was observed, or None."""
    accumulation: Annotated[tuple[Accumulation, ...], AT_LEAST_ONE]
    dtypes: Annotated[tuple[ObservedDtype, ...], AT_LEAST_ONE]
    layer_norm: tuple[NormalisedActivations, ...] = ()
    """Empty in records of earlier versions."""
    format_version: int = FORMAT_VERSION
