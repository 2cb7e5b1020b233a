"""Studies of ceilings as files: written, read and checked, and found by the name of a device."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cs336_systems.config import Precision
from cs336_systems.hardware import bare_name
from cs336_systems.json_files import encode_json, read_json
from cs336_systems.record import RecordError
from cs336_systems.studies.ceilings_records import FORMAT_VERSION, CeilingsStudy, ProductPrecision, Stream

FILE_NAME = "ceilings.json"


def encode_study(study: CeilingsStudy) -> bytes:
    """The study as indented JSON."""
    return encode_json(study)


def read_study(path: Path) -> CeilingsStudy:
    """Read and check a study; raise RecordError naming the file and the first thing wrong in it."""
    return read_json(path, CeilingsStudy, "a study of ceilings", version=FORMAT_VERSION, error=RecordError)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What studies measured at best, by device: what a step's rates are shares of, beside the data sheet's promises."""

    studies: tuple[CeilingsStudy, ...] = ()

    def flops_per_s(self, device_name: str, precision: Precision | ProductPrecision) -> float | None:
        """Highest rate of matrix products that any study of this device measured, or None."""
        wanted = ProductPrecision(precision)
        return _best(study.product_ceiling(wanted) for study in self._of(device_name))

    def bytes_per_s(self, device_name: str, stream: Stream = Stream.COPY) -> float | None:
        """Highest rate over memory that any study of this device measured, or None."""
        return _best(study.bandwidth(stream) for study in self._of(device_name))

    def _of(self, device_name: str) -> Iterator[CeilingsStudy]:
        return (study for study in self.studies if bare_name(study.device_name) == bare_name(device_name))


NO_CEILINGS = Ceilings()


def load_ceilings(directory: Path) -> Ceilings:
    """The studies in the folders of `directory`; none where it is not there. RecordError for a damaged one."""
    return Ceilings(tuple(read_study(path) for path in sorted(directory.glob(f"*/{FILE_NAME}"))))


def ceilings_beside(results: Path) -> Path:
    """Where the ceilings are that belong to OUTPUT/KIND/NAME: OUTPUT/ceilings."""
    return results.resolve().parent.parent / "ceilings"


def _best(rates: Iterable[float | None]) -> float | None:
    return max((rate for rate in rates if rate is not None), default=None)
