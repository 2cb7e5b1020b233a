"""The environment of a run: hardware, driver, versions, source code. Only the function
`environment` imports torch.
"""

import functools
import hashlib
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import psutil

from .. import __version__
from ..config import Device, RunConfig
from ..costs.fit import host_bytes
from ..model.fast.packages import FLASH_4, QUACK, version_of
from ..record import Environment, Identity
from .nvml import Gpu, visible_gpus

PACKAGE = Path(__file__).parents[1]
MEASURING_FOLDERS = ("model", "parallel", "measure", "studies")
"""Folders of the package whose source can change a measured time. Presets, help texts and
reports lie elsewhere.
"""


def identity(device: Device, gpu: Gpu | None = None) -> Identity:
    """The conditions that records of one table must share; `gpu` defaults to the first visible
    one.
    """
    if device is Device.CPU:
        gpu = None
    elif gpu is None:
        gpu = next(iter(visible_gpus()), None)
    return Identity(
        device_name=gpu.name if gpu else cpu_name(),
        driver=gpu.driver if gpu else None,
        torch=importlib.metadata.version("torch"),
        code=code_digest(),
    )


def host_memory_bytes() -> int:
    """Memory of this machine, without swap."""
    return int(psutil.virtual_memory().total)


def lacking_memory(config: RunConfig) -> str | None:
    """What a run on the CPU needs and what this machine has, in words, if that is too little;
    else None.
    """
    return lacking_bytes(host_bytes(config, host_memory_bytes()) or 0)


def lacking_bytes(needed: int) -> str | None:
    """The same of so many bytes."""
    there = host_memory_bytes()
    if needed <= there:
        return None
    return (
        f"needs at least {needed / 2**30:.1f} GiB of memory, and this machine has "
        f"{there / 2**30:.1f} GiB"
    )


def measuring_files() -> list[str]:
    """Paths of the measuring source files, relative to the package, in a fixed order."""
    paths: list[Path] = []
    for folder in MEASURING_FOLDERS:
        paths += (PACKAGE / folder).rglob("*.py")
    return sorted(path.relative_to(PACKAGE).as_posix() for path in paths)


@functools.cache
def code_digest() -> str:
    """Digest of the measuring source files, comments included; records that differ in it are not
    mixed.
    """
    digest = hashlib.sha256()
    for name in measuring_files():
        digest.update(name.encode() + b"\0" + (PACKAGE / name).read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@functools.cache
def cpu_name() -> str:
    """Model name of the processor, from the operating system."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def usable_cpus() -> int:
    """Processors that this process may use; where the system does not say, those that there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def environment(device: Device, gpu: Gpu | None) -> Environment:
    """Everything that a record keeps about this machine and process. It needs torch, so call it
    where runs measure.
    """
    import torch

    from .precision import math_modes

    commit, dirty = git_state()
    on_gpu = device is Device.CUDA
    cudnn = torch.backends.cudnn.version() if on_gpu else None
    return Environment(
        identity=identity(device, gpu),
        device_uuid=gpu.uuid if gpu else None,
        device_memory_bytes=gpu.memory_bytes if gpu else None,
        cuda=torch.version.cuda,
        cudnn=None if cudnn is None else str(cudnn),
        quack=version_of(QUACK) if on_gpu else None,
        flash_attention_4=version_of(FLASH_4) if on_gpu else None,
        python=platform.python_version(),
        platform=platform.platform(),
        host=platform.node(),
        cpu=cpu_name(),
        cpu_count=usable_cpus(),
        load_1min=psutil.getloadavg()[0],
        torch_threads=torch.get_num_threads(),
        git_commit=commit,
        git_dirty=dirty,
        package_version=__version__,
        **math_modes(),
    )


@functools.cache
def git_state() -> tuple[str | None, bool | None]:
    """Commit of the checkout that contains the package, and whether files differ from it; None
    outside a checkout.

    A virtual environment inside another checkout counts as outside, since git does not track its
    files.
    """
    try:
        _git("ls-files", "--error-unmatch", ".")
        return _git("rev-parse", "HEAD"), bool(_git("status", "--porcelain", "--", "."))
    except (OSError, subprocess.SubprocessError):
        return None, None


def _git(*arguments: str) -> str:
    """Output of a git command in the package's folder; it takes no lock, which could disturb a
    concurrent commit.
    """
    git = ["git", "--no-optional-locks", "-C", str(PACKAGE), *arguments]
    return subprocess.run(
        git, capture_output=True, encoding="utf-8", check=True, timeout=10
    ).stdout.strip()
