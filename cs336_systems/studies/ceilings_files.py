"""Studies of ceilings as files: written, read and checked, and found by the name of a device."""

from pathlib import Path

import msgspec

from cs336_systems.config import Precision
from cs336_systems.record import MAX_RECORD_BYTES, RecordError
from cs336_systems.studies.ceilings_records import FORMAT_VERSION, CeilingsStudy, ProductPrecision, Stream

FILE_NAME = "ceilings.json"


def encode_study(study: CeilingsStudy) -> bytes:
    """The study as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(study), indent=2) + b"\n"


def read_study(path: Path) -> CeilingsStudy:
    """Read and check a study; raise RecordError naming the file and the first thing wrong in it."""
    if not path.is_file():
        raise RecordError(path, "not a file; needed the JSON that `cs336 ceilings` writes")
    if (size := path.stat().st_size) > MAX_RECORD_BYTES:
        raise RecordError(path, f"{size} bytes are more than a study ever has ({MAX_RECORD_BYTES})")
    data = path.read_bytes()
    try:
        version = msgspec.json.decode(data, type=_Versioned).format_version
        if version > FORMAT_VERSION:
            raise RecordError(
                path, f"format version {version} is newer than this program's {FORMAT_VERSION}; update it"
            )
        return msgspec.json.decode(data, type=CeilingsStudy)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise RecordError(path, f"not a study of ceilings: {error}") from error


class _Versioned(msgspec.Struct):
    format_version: int


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
