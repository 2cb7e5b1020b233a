"""`cs336 napkin` (also `cs336 account napkin`): how long training takes, and how large a model fits."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from cs336_systems.commands.account import device_meant
from cs336_systems.commands.flags import Switch, unset
from cs336_systems.commands.outcome import OK, checked, show
from cs336_systems.config import Precision
from cs336_systems.costs.napkin import SECONDS_PER_DAY, largest_model, training_days
from cs336_systems.files import encode_json

NOT_ASKED = "not asked"
LIMITS: Mapping[str, tuple[float, float]] = {
    "parameters": (1, 1e18),
    "tokens": (1, 1e24),
    "peak_tflops": (1e-6, 1e9),
    "count": (1, 1e9),
    "mfu": (1e-6, 1),
    "memory_gb": (1e-6, 1e9),
    "bytes_per_parameter": (1e-3, 1e6),
}
"""Smallest and largest accepted value of each number; values outside are typing errors, and could overflow."""


@dataclass(frozen=True, kw_only=True)
class NapkinArguments:
    """Compute from a handful of numbers how many days training takes, and how large a model fits.

    Give --parameters and --tokens for the days (6 N T FLOPs over count x peak x MFU), --memory-gb for the model. The
    lecture's examples: --parameters 70e9 --tokens 15e12 --device-name "H100 80GB HBM3" --count 1024 --mfu 0.5 is about
    144 days; --count 8 --memory-gb 80 is 40e9 parameters.
    """

    parameters: Annotated[float | None, unset("N", NOT_ASKED)] = None
    """Parameters of the model, such as 70e9."""
    tokens: Annotated[float | None, unset("T", NOT_ASKED)] = None
    """Tokens to train on, such as 15e12."""
    device_name: Annotated[str | None, unset("NAME", "this machine's GPU")] = None
    """GPU to train on, whose data sheet gives the peak."""
    precision: Precision = Precision.BF16
    """Precision of the matrix products, which decides the peak."""
    peak_tflops: Annotated[float | None, unset("TFLOP/S", "the device's")] = None
    """Dense peak of one GPU, in place of a known device's."""
    count: int = 1
    """Number of GPUs."""
    mfu: float = 0.5
    """Share of the peak that the model's FLOPs reach; above 0.5 is good."""
    memory_gb: Annotated[float | None, unset("GB", NOT_ASKED)] = None
    """Memory of one GPU (GB, 1e9 bytes)."""
    bytes_per_parameter: float = 16
    """Bytes that a parameter takes with its gradient and the optimizer's state; 16 is AdamW in fp32."""
    json: Switch = False
    """Print JSON instead of tables."""

    def check(self) -> None:
        """Raise ValueError for values out of range and for flags that ask for nothing."""
        for name, (least, most) in LIMITS.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:  # nor is NaN
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(f"{flag} must be from {least:g} to {most:g}, got {str(value)[:40]}")
        if (self.parameters is None) != (self.tokens is None):
            raise ValueError("the days of training need both --parameters and --tokens")
        if self.parameters is None and self.memory_gb is None:
            raise ValueError(
                "nothing is asked: give --parameters and --tokens for the days of training, or --memory-gb for the "
                "largest model"
            )

    def peak(self) -> tuple[float, str]:
        """Peak FLOP/s of one GPU and the source of that number; raise ValueError if no peak is known."""
        if self.peak_tflops is not None:
            if self.device_name is not None:
                raise ValueError("--peak-tflops takes the place of --device-name: give one of them")
            return self.peak_tflops * 1e12, "given"
        device = device_meant(self.device_name, lambda device: device.peak_flops_per_s.get(self.precision))
        if device is None:
            raise ValueError("needed --device-name or --peak-tflops: this machine has no GPU whose peak is known")
        peak, name = device.peak_flops_per_s.get(self.precision), self.device_name or device.names[0]
        if peak is None:
            raise ValueError(f"no peak of {name} at {self.precision} is known: give --peak-tflops")
        return peak, f"{name}, {self.precision}, dense, by its data sheet"


def run(arguments: NapkinArguments) -> int:
    """Print the days of training, the largest model, or both."""
    checked(arguments.check)
    from cs336_systems.report.sections.napkin import days_table, largest_table

    tables = []
    answers: dict[str, object] = {}
    if arguments.parameters is not None and arguments.tokens is not None:
        peak_flops_per_s, source = checked(arguments.peak)
        given: dict[str, Any] = {
            "parameters": arguments.parameters,
            "tokens": arguments.tokens,
            "peak_flops_per_s": peak_flops_per_s,
            "count": arguments.count,
            "mfu": arguments.mfu,
        }
        tables.append(days_table(**given, peak_source=source))
        answers["training"] = given | {"peak_source": source, "training_s": training_days(**given) * SECONDS_PER_DAY}
    if arguments.memory_gb is not None:
        given = {
            "memory_bytes": arguments.memory_gb * 1e9,
            "count": arguments.count,
            "bytes_per_parameter": arguments.bytes_per_parameter,
        }
        tables.append(largest_table(**given))
        answers["largest_model"] = given | {"parameters": largest_model(**given)}
    show(arguments.json, lambda: encode_json(answers), lambda: tables)
    return OK
