"""Studies of ceilings as files: written, read and checked, and found by the name of a device."""

from pathlib import Path

from cs336_systems.config import Precision
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


def find_studies(directory: Path, device_name: str) -> list[CeilingsStudy]:
    """Studies of exactly this device in the folders of `directory` (data/ceilings); RecordError for a damaged one."""
    studies = (read_study(path) for path in sorted(directory.glob(f"*/{FILE_NAME}")))
    return [study for study in studies if study.device_name == device_name]


def find_ceiling(directory: Path, device_name: str, precision: Precision | ProductPrecision) -> float | None:
    """Highest FLOP/s that any study of this device measured, or None where there is none; as find_studies."""
    wanted = ProductPrecision(precision)
    found = [study.product_ceiling(wanted) for study in find_studies(directory, device_name)]
    return max((ceiling for ceiling in found if ceiling is not None), default=None)


def find_bandwidth(directory: Path, device_name: str, stream: Stream = Stream.COPY) -> float | None:
    """Highest bytes per second that any study of this device measured over memory, or None; as find_studies."""
    found = [study.bandwidth(stream) for study in find_studies(directory, device_name)]
    return max((rate for rate in found if rate is not None), default=None)
