"""Whether modules can be imported here, tried in another process, which an import may end; the
user's cache keeps the answers.
"""

import contextlib
import functools
import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from . import __version__
from .files import user_cache, write_atomically
from .text import print_aside
from .waits import waiting_for

CAN_BE_IMPORTED, CANNOT_BE_IMPORTED = "can be imported", "cannot be imported: "
"""What is kept of a try: the first alone, or the second and why."""
_TRIED = "cs336 tried "
"""How a line begins that says of a module whether it was imported."""
_TRY = f"""
import importlib, os, sys, traceback
for module in sys.argv[1:]:
    why = ""
    try:
        importlib.import_module(module)
    except Exception as error:
        why = traceback.format_exception_only(error)[-1].strip().splitlines()[-1]
    print(f"\\n{_TRIED}{{module}} {{why}}", flush=True)
os._exit(0)
"""
"""A program that tries to import each of its arguments."""
_meanwhile: list[Callable[[], object]] = []
"""What this process does while another one tries imports."""
DRIVER = Path("/proc/driver/nvidia/version")
VARIABLES = ("CUDA", "CUTE", "LD_", "NVIDIA", "PYTHON", "TORCH", "TRITON")
"""How the names of variables begin on which imports of these packages may depend."""


def do_meanwhile(work: Callable[[], object]) -> None:
    """Call `work` while another process tries imports, if one has to."""
    _meanwhile[:] = [work]


@functools.cache
def import_failure(module: str, others: tuple[str, ...] = ()) -> str | None:
    """Why the module cannot be imported; None if it can.

    A process tries once for each environment, which takes many seconds, and the user's cache keeps
    the answer. It tries the `others` too, of which nothing is known yet, because they share most of
    what they import.
    """
    answer = _read_answer(module)
    if answer is not None:
        is_usable = answer == CAN_BE_IMPORTED
        return None if is_usable else f"{answer} (as {_kept_answer(module)} says)"
    unknown = [other for other in others if other != module and _read_answer(other) is None]
    modules = [module, *unknown]
    names = " and ".join(name.rpartition(".")[2] for name in modules)
    print_aside(f"looking whether {names} can be imported, once for this environment")
    with waiting_for("looking what can be imported"):
        failures = _import_elsewhere(modules)
    for tried, failure in failures.items():
        kept = _kept_answer(tried)
        with contextlib.suppress(OSError):  # without a cache it is looked at each time
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(kept, (failure or CAN_BE_IMPORTED).encode(errors="replace"))
    return failures[module]


def _read_answer(module: str) -> str | None:
    """What is kept of an earlier try; None if nothing is, or nothing that can be read."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        answer = _kept_answer(module).read_text(encoding="utf-8")
        if answer.startswith((CAN_BE_IMPORTED, CANNOT_BE_IMPORTED)):
            return answer
    return None


def _import_elsewhere(modules: Sequence[str]) -> dict[str, str | None]:
    """Why each of the modules cannot be imported, or None if it can.

    A process tries one after the other, since a module may end it. A module that ends it is tried
    by no other; what comes after that module is.
    """
    failures: dict[str, str | None] = {}
    while left := [module for module in modules if module not in failures]:
        status, output, errors = _run_elsewhere(["-P", "-c", _TRY, *left])
        for line in output.splitlines():
            module, _, why = line.removeprefix(_TRIED).partition(" ")
            if line.startswith(_TRIED) and module in left:
                failures[module] = f"{CANNOT_BE_IMPORTED}{why}" if why else None
        for ending in [module for module in left if module not in failures][:1]:
            said = errors.splitlines() or [f"its process ended with status {status}"]
            failures[ending] = f"{CANNOT_BE_IMPORTED}{said[-1]}"
    return failures


def _run_elsewhere(arguments: Sequence[str]) -> tuple[int, str, str]:
    """The status of Python with these arguments and this process's path, and what it wrote to both
    streams; meanwhile this process does what it is to do.
    """
    process = subprocess.Popen(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )
    with process:
        try:
            while _meanwhile:
                _meanwhile.pop()()
            output, errors = process.communicate()
        except BaseException:
            process.kill()
            raise
    return process.returncode, output, errors


def _kept_answer(module: str) -> Path:
    """The file for whether the module can be imported, of what that may depend on.

    That is Python, its path, all packages and when they were installed, the driver, the machine,
    and variables.
    """
    parts = [module, __version__, sys.version, platform.node(), *sys.path]
    for folder in map(Path, sys.path):
        with contextlib.suppress(OSError):
            packages = sorted(folder.glob("*.dist-info"))
            parts += [f"{package.name} {package.stat().st_mtime_ns}" for package in packages]
    with contextlib.suppress(OSError):
        parts.append(DRIVER.read_text(encoding="utf-8"))
    names = sorted(name for name in os.environ if name.startswith(VARIABLES))
    parts += [f"{name}={os.environ[name]}" for name in names]
    digest = hashlib.sha256("\0".join(parts).encode(errors="surrogateescape")).hexdigest()[:20]
    return user_cache() / "imports" / f"{module}.{digest}"


def forget_answer(module: str) -> None:
    """Delete the stored answer whether the module can be imported, so that the next command tries
    again; called when an import failed.
    """
    with contextlib.suppress(OSError):
        _kept_answer(module).unlink()
