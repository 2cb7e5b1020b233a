"""What is said of the machine is what other programs say of it, and the identity changes exactly
when it should.
"""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cs336.config import Device
from cs336.measure import environment as module
from cs336.measure.environment import (
    PACKAGE,
    code_digest,
    cpu_name,
    git_state,
    identity,
    measuring_files,
)
from cs336.measure.nvml import Gpu

GPU = Gpu(index=0, uuid="GPU-1", name="NVIDIA H100 80GB HBM3", memory_bytes=2**36, driver="580.1")


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the package, and this module made to believe that it runs from there."""
    copy = tmp_path / "checkout" / "cs336_systems"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(module, "PACKAGE", copy)
    for name in ("GIT_DIR", "GIT_WORK_TREE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    yield copy
    code_digest.cache_clear()
    git_state.cache_clear()


def digest() -> str:
    code_digest.cache_clear()
    return code_digest()


def test_the_identity_of_a_gpu_run_is_the_gpu_s_and_of_a_cpu_run_the_cpu_s() -> None:
    on_gpu, on_cpu = identity(Device.CUDA, GPU), identity(Device.CPU)
    assert (on_gpu.device_name, on_gpu.driver) == ("NVIDIA H100 80GB HBM3", "580.1")
    assert (on_cpu.device_name, on_cpu.driver) == (cpu_name(), None)
    assert on_gpu.torch == on_cpu.torch
    assert torch.__version__.startswith(on_cpu.torch), "which may add what it was built for"
    assert identity(Device.CPU, GPU) == on_cpu, "a GPU that is there but not used plays no part"


def test_a_change_of_what_measures_changes_the_identity_and_no_other_change_does(
    elsewhere: Path,
) -> None:
    digests = [digest()]
    assert digests[0] == digest()
    for name in measuring_files():
        with (elsewhere / name).open("a") as file:
            file.write("# changed\n")
        digests.append(digest())
    assert len(set(digests)) == 1 + len(measuring_files())
    for path in elsewhere.rglob("*.py"):
        if path.relative_to(elsewhere).as_posix() not in measuring_files():
            path.write_text(path.read_text() + "# changed\n")
    assert digest() == digests[-1]


def git(directory: Path, *arguments: str) -> str:
    author = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", "-C", str(directory), *author, *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def state() -> tuple[str | None, bool | None]:
    git_state.cache_clear()
    return git_state()


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_is_git_s_and_changes_of_the_package_alone_make_it_dirty(
    elsewhere: Path,
) -> None:
    checkout = elsewhere.parent
    assert state() == (None, None), "no repository yet"
    git(checkout, "init", "-q")
    git(checkout, "add", ".")
    git(checkout, "commit", "-qm", "first")
    commit = git(checkout, "rev-parse", "HEAD")
    assert state() == (commit, False)
    (checkout / "notes.txt").write_text("not part of the package")
    assert state() == (commit, False)
    index = (checkout / ".git" / "index").read_bytes()
    (elsewhere / "cli.py").touch()
    assert state() == (commit, False)
    assert (checkout / ".git" / "index").read_bytes() == index, (
        "a commit at the same moment is not disturbed"
    )
    (elsewhere / "record.py").write_text("# changed\n")
    assert state() == (commit, True)
    git(checkout, "commit", "-qam", "second")
    assert state() == (git(checkout, "rev-parse", "HEAD"), False)
    assert git(checkout, "rev-parse", "HEAD") != commit
