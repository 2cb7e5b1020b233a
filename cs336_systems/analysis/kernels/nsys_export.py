"""Find the program nsys, and export its reports to SQLite."""

import shutil
import subprocess
from pathlib import Path

HOW_TO_INSTALL = (
    "nsys (NVIDIA Nsight Systems) is not on the PATH: install it (package nsight-systems-cli of NVIDIA's CUDA "
    "repository, or developer.nvidia.com/nsight-systems), or use --profile, which needs nothing but PyTorch"
)


class NsysError(RuntimeError):
    """nsys is missing or failed; the message says what to do."""


def has_nsys() -> bool:
    """Whether nsys is installed."""
    return shutil.which("nsys") is not None


def find_nsys() -> str:
    """Path of nsys; raise NsysError if it is not installed."""
    if (nsys := shutil.which("nsys")) is None:
        raise NsysError(HOW_TO_INSTALL)
    return nsys


def export(report: Path, directory: Path) -> Path:
    """Export the report to a SQLite file in `directory` and return its path; raise NsysError if nsys fails."""
    database = directory / f"{report.stem}.sqlite"
    command = [find_nsys(), "export", "--type=sqlite", "--force-overwrite=true", f"--output={database}", str(report)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    if done.returncode or not database.is_file():
        said = " ".join((done.stderr or done.stdout).split())[-500:]
        raise NsysError(f"{report}: nsys export ended with status {done.returncode}: {said}")
    return database
