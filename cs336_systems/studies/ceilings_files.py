"""The files of studies of ceilings, which are found by the name of their device.

Ceilings of a few devices come with the program (costs/devices), so that forecasts of these are the
same everywhere.
"""

import functools
import gzip
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TypeVar

from ..analysis.warnings import in_doubt
from ..config import Precision
from ..costs.communication import Collective
from ..costs.curves import Curves
from ..costs.hardware import bare_name
from .ceilings_records import CeilingsStudy, Launch, ProductPrecision
from .records import read_study

FILE_NAME = "ceilings.json"
SHIPPED = Path(__file__).parents[1] / "costs" / "devices"
"""Folders of the devices whose ceilings come with the program; each file is a study's,
compressed by gzip.
"""
SUFFIX = ".json.gz"
DOUBTED_SHARE = 0.25
"""Share of the cells of a device's studies from which on forecasts are in doubt if these cells
are.
"""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The best that studies have measured on each device; the rates of a step are reported as
    shares of it.
    """

    studies: tuple[CeilingsStudy, ...] = ()
    """Those that the user has measured, which come before those that come with the program."""
    has_shipped: bool = False
    """Whether ceilings that come with the program stand in where the user has measured none."""
    _curves: dict[str, Curves | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """By the name of the device, once they were asked for, so that predictions from them can be
    kept.
    """

    @property
    def measured_names(self) -> list[str]:
        """The devices that the user has measured, without the manufacturer's name."""
        return list(dict.fromkeys(bare_name(study.device_name) for study in self.studies))

    @property
    def device_names(self) -> list[str]:
        """The devices with ceilings, without the manufacturer's name; those that the user has
        measured come first.
        """
        folders = SHIPPED.iterdir() if self.has_shipped else ()
        shipped = sorted(
            path.name.replace("-", " ") for path in folders if any(path.glob(f"*{SUFFIX}"))
        )
        return list(dict.fromkeys([*self.measured_names, *shipped]))

    def is_shipped(self, device_name: str) -> bool:
        """Whether predictions for this device rest on ceilings that come with the program."""
        curves = self.curves(device_name)
        return curves is not None and curves.is_shipped

    def _own(self, device_name: str) -> tuple[CeilingsStudy, ...]:
        name = bare_name(device_name)
        return tuple(study for study in self.studies if bare_name(study.device_name) == name)

    def _first(self, device_name: str, take: Callable[[tuple[CeilingsStudy, ...]], T]) -> T:
        """What the user's studies of the device have, or else those that come with the program."""
        found = take(self._own(device_name))
        return found if found or not self.has_shipped else take(shipped(device_name))

    def flops_per_s(
        self, device_name: str, precision: Precision | ProductPrecision
    ) -> float | None:
        """Highest rate of matmuls that any study of this device measured, or None."""
        wanted = ProductPrecision(precision)

        def best(studies: tuple[CeilingsStudy, ...]) -> float | None:
            rates = (
                cell.flops_per_s
                for each in studies
                for cell in each.products
                if cell.precision is wanted
            )
            return max((rate for rate in rates if rate is not None), default=None)

        return self._first(device_name, best)

    def curves(self, device_name: str) -> Curves | None:
        """The times from which those of steps are predicted: of the first study of this device that
        has them.

        The kernels of steps are those of all its studies, so that sizes can be measured one after
        the other. The time of a launch is the median over the studies, since the same devices are
        in machines with faster and slower hosts: over those that have timed the launches of a step,
        if there are any.
        """
        name = bare_name(device_name)
        if name not in self._curves:
            curves = self._joined_curves(self._own(name))
            if (
                curves is None
                and self.has_shipped
                and (other := self._joined_curves(shipped(name))) is not None
            ):
                curves = replace(other, is_shipped=True)
            self._curves[name] = curves and replace(curves, collectives=self.collectives(name))
        return self._curves[name]

    @staticmethod
    def _joined_curves(studies: tuple[CeilingsStudy, ...]) -> Curves | None:
        found = [curves for study in studies if (curves := study.curves()) is not None]
        if not found:
            return None
        first, *others = found
        matmuls = {
            precision: (
                *own,
                *(
                    each
                    for other in others
                    for each in other.matmuls[precision]
                    if each.form is not None
                ),
            )
            for precision, own in first.matmuls.items()
        }
        passes = next((each.passes for each in found if each.passes), {})
        gap_s = next((each.queued_gap_s for each in found if each.queued_gap_s is not None), None)
        hosts = [each for each in studies if each.launch_s(Launch.STEP) is not None] or studies
        timed = [
            timing for study in studies for timing in study.timings if timing.loops is not None
        ]
        doubted = sum(in_doubt(warning.code for warning in timing.warnings) for timing in timed)
        return replace(
            first,
            matmuls=matmuls,
            passes=passes,
            queued_gap_s=gap_s,
            is_in_doubt=doubted > DOUBTED_SHARE * len(timed),
            launch_s=median(time_s for each in hosts if (time_s := each.host_call_s) is not None),
        )

    def collectives(self, device_name: str) -> dict[int, dict[Collective, dict[int, float]]]:
        """Times of collectives among devices of this name, by ranks and bytes: of the study with
        most sizes of each.
        """

        def longest(
            studies: tuple[CeilingsStudy, ...],
        ) -> dict[int, dict[Collective, dict[int, float]]]:
            found: dict[int, dict[Collective, dict[int, float]]] = {}
            for study in studies:
                for (ranks, kind), times in study.collective_times().items():
                    of_ranks = found.setdefault(ranks, {})
                    of_ranks[kind] = max(of_ranks.get(kind, {}), times, key=len)
            return found

        return self._first(device_name, longest)

    def collective_times(self, device_name: str, ranks: int) -> dict[Collective, dict[int, float]]:
        """Times of each collective among `ranks` devices of this name, by bytes."""
        return self.collectives(device_name).get(ranks, {})


NO_CEILINGS = Ceilings()


def load_ceilings(directory: Path) -> Ceilings:
    """The study in `directory`, which need not exist, or those in its folders; raise RecordError
    for a damaged one.

    Ceilings that come with the program stand in for devices that have none there.
    """
    studies = tuple(read_study(path, CeilingsStudy) for path in ceilings_files(directory))
    return Ceilings(studies, has_shipped=True)


@functools.cache
def shipped(device_name: str) -> tuple[CeilingsStudy, ...]:
    """The studies of this device that come with the program, in the order of the folders that
    they were measured in.
    """
    found = (SHIPPED / bare_name(device_name).replace(" ", "-")).glob(f"*{SUFFIX}")
    files = sorted(found, key=lambda path: path.name.removesuffix(SUFFIX))
    return tuple(
        read_study(path, CeilingsStudy, gzip.decompress(path.read_bytes())) for path in files
    )


def ceilings_files(directory: Path) -> list[Path]:
    """The file of the study in `directory`, or the files of those in its folders."""
    own = directory / FILE_NAME
    return [own] if own.exists() else sorted(directory.glob(f"*/{FILE_NAME}"))


def ceilings_beside(results: Path) -> Path:
    """The directory of ceilings that belongs to results in OUTPUT/KIND/NAME.

    That is OUTPUT/ceilings; if it does not exist, `ceilings` beside OUTPUT, which is then a group
    of results.
    """
    output = results.resolve().parent.parent
    own, beside = output / "ceilings", output.parent / "ceilings"
    return beside if beside.is_dir() and not own.is_dir() else own
