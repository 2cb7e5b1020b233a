"""Packages of `.[fused]` that some settings of the fast model need on a GPU, and whether they can
be used here.
"""

import contextlib
import functools
import gc
import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ... import __version__
from ...config import SETTINGS, Device, RunConfig
from ...files import user_cache, write_atomically
from ...settings import flag_of
from ...text import print_aside
from ...waits import waiting_for

QUACK, FLASH_4 = "quack-kernels", "flash-attn-4"
"""The packages whose matmuls compute activations too, and of FlashAttention 4."""
VERSIONS = {QUACK: "0.6", FLASH_4: "4.0.0b36"}
"""How the versions begin that this project was tested with; what it calls of these packages may
change in others.
"""
OF_PACKAGE = {"fused_activations": QUACK, "packed_attention": FLASH_4}
"""The settings that need a package on a GPU."""
IMPORTED_BY = {QUACK: "feed_forward_kernel", FLASH_4: "attention_kernel"}
"""The modules beside this one that import what the fast model needs of the package."""
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
DRIVER = Path("/proc/driver/nvidia/version")
VARIABLES = ("CUDA", "CUTE", "LD_", "NVIDIA", "PYTHON", "TORCH", "TRITON")
"""How the names of variables begin on which imports of these packages may depend."""


def is_installed(package: str) -> bool:
    """Whether this package is installed in a tested version, and can be imported with all that
    it imports.
    """
    return why_unusable(package) is None


def why_unusable(package: str) -> str | None:
    """Why this package cannot be used, to be put after its name; None if it can."""
    untested = _why_untested(package)
    return untested or import_failure(_importing(package))


def _why_untested(package: str) -> str | None:
    """Why this package is not there in a tested version; None if it is."""
    version, tested = version_of(package), VERSIONS[package]
    if version is None:
        return "is not installed"
    if not f"{version}.".startswith(f"{tested}."):
        return f"is installed in version {version}, and was tested in {tested}"
    return None


def _importing(package: str) -> str:
    """The module of this project that imports the package."""
    return f"{__package__}.{IMPORTED_BY[package]}"


@functools.cache
def import_failure(module: str) -> str | None:
    """Why the module cannot be imported; None if it can.

    A process tries once for each environment, which takes many seconds, and the user's cache keeps
    the answer. It tries the modules of all packages, because they share most of what they import.
    """
    answer = _read_answer(module)
    if answer == CAN_BE_IMPORTED:
        return None
    if answer is not None:
        return f"{answer} (as {_kept_answer(module)} says)"
    others = [_importing(package) for package in IMPORTED_BY if _why_untested(package) is None]
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

    A process tries one after the other. A module that ends it is tried by no other; what comes
    after that module is.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    failures: dict[str, str | None] = {}
    while left := [module for module in modules if module not in failures]:
        command = [sys.executable, "-P", "-c", _TRY, *left]
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
        )
        for line in done.stdout.splitlines():
            module, _, why = line.removeprefix(_TRIED).partition(" ")
            if line.startswith(_TRIED) and module in left:
                failures[module] = f"{CANNOT_BE_IMPORTED}{why}" if why else None
        for ending in [module for module in left if module not in failures][:1]:
            said = done.stderr.splitlines() or [f"its process ended with status {done.returncode}"]
            failures[ending] = f"{CANNOT_BE_IMPORTED}{said[-1]}"
    return failures


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


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """Context for importing a package: its functions are left as they are where torch.compile is to
    compile or avoid them, unless that is imported already.

    QuACK decorates some of its functions so, and each decorator would import torch.compile, which
    takes longer than the package. The fast model calls these functions within operators only, into
    which torch.compile does not look. The garbage collector is off: it would look again and again
    at all that is imported.
    """
    import torch

    def as_it_is(function: Any = None, *, recompile_limit: int | None = None, **_: Any) -> Any:
        """The function, or a decorator that returns it; QuACK looks for the named parameter."""
        del recompile_limit
        return (lambda decorated: decorated) if function is None else function

    decorators: list[tuple[Any, str]] = []
    if "torch._dynamo" not in sys.modules:
        decorators = [(torch, "compile"), (torch.compiler, "disable")]
    before = [getattr(*decorator) for decorator in decorators]
    collects = gc.isenabled()
    gc.disable()
    for decorator in decorators:
        setattr(*decorator, as_it_is)
    try:
        yield
    finally:
        for decorator, function in zip(decorators, before, strict=True):
            setattr(*decorator, function)
        if collects:
            gc.enable()


def check_packages(config: RunConfig) -> None:
    """Raise ValueError for a setting whose package cannot be used; a CPU needs none."""
    for name, package in OF_PACKAGE.items() if config.device is Device.CUDA else ():
        if getattr(config, name) and not is_installed(package):
            raise ValueError(package_needed(name, str(why_unusable(package))))


def package_needed(name: str, why: str) -> str:
    """The error for a setting that is asked for although its package cannot be used."""
    package = OF_PACKAGE[name]
    flag = flag_of(name, SETTINGS[name])
    return f"{flag} needs {package} {VERSIONS[package]}, which {why}: pip install '.[fused]'"


def version_of(package: str) -> str | None:
    """The installed version of this package; None if there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
