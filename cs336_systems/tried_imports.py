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
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from . import __version__
from .files import user_cache, write_atomically
from .text import print_aside
from .waits import waiting_for

CAN_BE_IMPORTED, CANNOT_BE_IMPORTED = "can be imported", "cannot be imported: "
"""What is kept of a try: the first alone, or the second and why."""
_TRIED = "cs336 tried "
"""How a line begins that says of a module whether it was imported."""
_TRIED_ALL = "cs336 tried everything"
_TRY = f"""
import importlib, os, sys, traceback
for module in sys.argv[1:]:
    why = ""
    try:
        importlib.import_module(module)
    except Exception as error:
        why = traceback.format_exception_only(error)[-1].strip().splitlines()[-1]
    print(f"\\n{_TRIED}{{module}} {{why}}", flush=True)
print("\\n{_TRIED_ALL}", flush=True)
for line in sys.stdin:
    module, function, *arguments = line.split()
    if os.fork() == 0:
        status = 1
        try:
            for stream in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
            getattr(importlib.import_module(module), function)(*arguments)
            status = 0
        finally:
            os._exit(status)
statuses = []
try:
    while True:
        statuses.append(os.wait()[1])
except ChildProcessError:
    os._exit(int(any(statuses)))
"""
"""A program that tries to import each of its arguments, and then calls what its input names, each
in a process forked off it, in which these imports are there already.
"""
_meanwhile: list[Callable[[], object]] = []
"""What this process does while another one tries imports."""
_idle: list["subprocess.Popen[str]"] = []
"""The process that has tried imports and waits for calls, if there is one."""
DRIVER = Path("/proc/driver/nvidia/version")
VARIABLES = ("CUDA", "CUTE", "LD_", "NVIDIA", "PYTHON", "TORCH", "TRITON")
"""How the names of variables begin on which imports of these packages may depend."""


def do_meanwhile(work: Callable[[], object]) -> None:
    """Call `work` while another process tries imports, if one has to; that process then waits for
    `call_elsewhere`.
    """
    _meanwhile[:] = [work]


def call_elsewhere(calls: Iterable[Sequence[str]]) -> "subprocess.Popen[str] | None":
    """Let the process that has tried imports make these calls, each in a process of its own: a
    module, a function, and arguments without spaces.

    The process that is returned ends when all of them have ended, with status 0 if none failed.
    None if no process has had to try imports: nothing is called then.
    """
    if not _idle:
        return None
    process = _idle.pop()
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it was ended; its status says so
        process.stdin.writelines(" ".join(call) + "\n" for call in calls)
        process.stdin.close()
    return process


@functools.cache
def import_failure(
    module: str, others: tuple[str, ...] = (), variables: tuple[tuple[str, str], ...] = ()
) -> str | None:
    """Why the module cannot be imported; None if it can.

    A process tries once for each environment, which takes many seconds, and the user's cache keeps
    the answer. It tries the `others` too, of which nothing is known yet, because they share most of
    what they import. It has these environment variables, where they are not set already.
    """
    answer = _read_answer(module)
    if answer is not None:
        if answer == CAN_BE_IMPORTED:
            return None
        return f"{answer} (as {_kept_answer(module)} says)"
    unknown = [other for other in others if other != module and _read_answer(other) is None]
    modules = [module, *unknown]
    names = " and ".join(name.rpartition(".")[2] for name in modules)
    print_aside(f"looking whether {names} can be imported, once for this environment")
    with waiting_for("looking what can be imported"):
        failures = _import_elsewhere(modules, dict(variables))
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


def _import_elsewhere(
    modules: Sequence[str], variables: Mapping[str, str] | None = None
) -> dict[str, str | None]:
    """Why each of the modules cannot be imported, or None if it can.

    A process tries one after the other, since a module may end it. A module that ends it is tried
    by no other; what comes after that module is.
    """
    failures: dict[str, str | None] = {}
    while left := [module for module in modules if module not in failures]:
        output, ending = _try_elsewhere(left, variables or {})
        for line in output:
            module, _, why = line.removeprefix(_TRIED).partition(" ")
            if line.startswith(_TRIED) and module in left:
                failures[module] = f"{CANNOT_BE_IMPORTED}{why}" if why else None
        for module in [module for module in left if module not in failures][:1]:
            failures[module] = f"{CANNOT_BE_IMPORTED}{ending}"
    return failures


def _try_elsewhere(modules: Sequence[str], variables: Mapping[str, str]) -> tuple[list[str], str]:
    """The lines that a process has written which tries the modules, with this process's path and
    these variables; and, if it ended before it had tried all, its last words or else its status.

    Meanwhile this process does what it is to do. If there was something to do, the other one is
    kept for calls.
    """
    is_kept = bool(_meanwhile)
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _TRY, *modules],
            env=dict(variables)
            | os.environ
            | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        try:
            while _meanwhile:
                _meanwhile.pop()()
            output = _lines_until(_TRIED_ALL, process)
        except BaseException:
            process.kill()
            process.communicate()
            raise
        if is_kept and output[-1:] == [_TRIED_ALL]:
            _idle[:] = [process]
            return output, ""
        process.communicate()
        errors.seek(0)
        said = errors.read().splitlines()
    return output, said[-1] if said else f"its process ended with status {process.returncode}"


def _lines_until(last: str, process: "subprocess.Popen[str]") -> list[str]:
    """What the process writes, up to and with this line, or to its end."""
    assert process.stdout is not None
    output: list[str] = []
    for line in process.stdout:
        output.append(line.rstrip("\n"))
        if output[-1] == last:
            break
    return output


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
