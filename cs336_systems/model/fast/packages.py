"""Packages of `.[fused]` that some settings need on a GPU, and whether they can be used here."""

import contextlib
import gc
import importlib.metadata
import sys
from collections.abc import Iterator
from typing import Any

from ...config import SETTINGS, Device, RunConfig
from ...settings import flag_of
from ...tried_imports import import_failure

QUACK, FLASH_4 = "quack-kernels", "flash-attn-4"
"""The packages whose matmuls compute activations too, and of FlashAttention 4."""
VERSIONS = {QUACK: "0.6", FLASH_4: "4.0.0b36"}
"""How the tested versions begin; what is called of these packages may change in others."""
OF_PACKAGE = {"fused_activations": QUACK, "packed_attention": FLASH_4}
"""The settings that need a package on a GPU."""
IMPORTED_BY = {QUACK: "feed_forward_kernel", FLASH_4: "attention_kernel"}
"""The modules beside this one that import what the fast model needs of the package."""

WITHOUT_CUDA = (
    ("QUACK_ARCH", "sm_90"),
    ("CUTE_DSL_ARCH", "sm_90a"),
    ("PYTORCH_NVML_BASED_CUDA_CHECK", "1"),
)
"""Variables with which importing the packages, which are used on Hopper only, does not start CUDA.

Without the first two they ask the GPU what it is, and without the last PyTorch asks CUDA whether
there is one. A process that has started CUDA cannot be forked into others that use the GPU
(compiled_ahead.py).
"""


def is_installed(package: str) -> bool:
    """Whether this package is installed in a tested version, and can be imported."""
    return why_unusable(package) is None


def why_unusable(package: str) -> str | None:
    """Why this package cannot be used, to be put after its name; None if it can."""
    untested = _why_untested(package)
    return untested or import_failure(module_importing(package), _modules(), WITHOUT_CUDA)


def _why_untested(package: str) -> str | None:
    """Why this package is not there in a tested version; None if it is."""
    version, tested = version_of(package), VERSIONS[package]
    if version is None:
        return "is not installed"
    if not f"{version}.".startswith(f"{tested}."):
        return f"is installed in version {version}, and was tested in {tested}"
    return None


def module_importing(package: str) -> str:
    """The module of this project that imports the package."""
    return f"{__package__}.{IMPORTED_BY[package]}"


def _modules() -> tuple[str, ...]:
    """The modules that import the packages which are there in a tested version."""
    there = [package for package in IMPORTED_BY if _why_untested(package) is None]
    return tuple(map(module_importing, there))


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
