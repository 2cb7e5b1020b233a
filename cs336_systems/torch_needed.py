"""PyTorch is the user's own: installing this package never changes it, and reading files needs
none. What runs or traces a step asks here first.
"""

import importlib.metadata

LEAST = (2, 11)
"""Oldest version of PyTorch that runs and traces steps; `pyproject.toml` names it too."""
LEAST_TO_WATCH = (2, 6)
"""Oldest version under which `watch` is tested."""


class TorchError(ImportError):
    """What was asked needs PyTorch, which is not there or is too old."""


def torch_version() -> str | None:
    """The version of PyTorch that is installed; None if there is none."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def lacking_torch(least: tuple[int, int] = LEAST) -> str:
    """What is needed and what is there, in words, if PyTorch is missing or older; else empty."""
    version = torch_version()
    needed = f"needs PyTorch {least[0]}.{least[1]} or newer"
    if version is None:
        return f"{needed}, which is not installed: `pip install torch`"
    major, minor = version.split(".")[:2]
    if (int(major), int(minor)) < least:
        return f"{needed}, and {version} is installed"
    return ""


def require_torch(what: str, least: tuple[int, int] = LEAST) -> None:
    """Raise TorchError if PyTorch is missing or older than `what` needs."""
    reason = lacking_torch(least)
    if reason:
        raise TorchError(f"{what} {reason}")
