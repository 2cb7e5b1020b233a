"""Windows and macOS, whose Python lacks modules and functions that Linux has: what they lack is
taken away from the program, and files are still read and steps still foretold.
"""

import ast
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from cs336.posix_needed import LACKING
from tests.faults.harness import ROOT

LIMITED = ("os", "signal", "time", "select", "socket", "subprocess", "multiprocessing.context")
"""Modules that every system has, without some of their names."""
ABSENT = ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog")
"""Modules that Windows does not have."""
TAKEN_AWAY = """
import builtins, json, os, sys, types, warnings

lacking = json.loads(sys.argv.pop(1))
import_any = builtins.__import__


def open_no_directory(path, *others, **options):
    if os.path.isdir(path):
        raise PermissionError(13, "Permission denied", path)
    return os.open(path, *others, **options)


def without(module, names):
    kept = {name: value for name, value in vars(module).items() if name not in names}
    limited = types.ModuleType(module.__name__)
    limited.__dict__.update(kept)
    if module is os and "fork" in names:
        limited.open = open_no_directory
    return limited


def import_what_there_is(name, variables=None, *others, **options):
    module = import_any(name, variables, *others, **options)
    importer = (variables or {}).get("__name__", "")
    if not importer.startswith("cs336") or module.__name__ not in lacking:
        return module
    names = lacking[module.__name__]
    if names is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return without(module, names)


builtins.__import__ = import_what_there_is
# a text file that is opened without its encoding has another one on Windows
warnings.filterwarnings("error", category=EncodingWarning, module=r"cs336(\\.|$)")
"""


def names_in(body: list[ast.stmt], platform: str) -> set[str]:
    """The names that statements of a stub define on this platform, without what they import."""
    names: set[str] = set()
    for statement in body:
        if isinstance(statement, ast.If):
            asked = compile(ast.Expression(statement.test), "stub", "eval")
            system = SimpleNamespace(platform=platform, version_info=sys.version_info)
            branch = statement.body if eval(asked, {"sys": system}) else statement.orelse
            names |= names_in(branch, platform)
        elif isinstance(statement, ast.FunctionDef | ast.ClassDef):
            names.add(statement.name)
        elif isinstance(statement, ast.AnnAssign):
            names.add(ast.unparse(statement.target))
        elif isinstance(statement, ast.Assign):
            names |= {ast.unparse(target) for target in statement.targets}
    return names


def lacking_on(platform: str) -> dict[str, list[str] | None]:
    """By the stubs of Python's own library, what each module lacks there; None: it is not there."""
    checker = find_spec("mypy")
    if checker is None or checker.origin is None:
        pytest.skip("mypy, which has the stubs, is not installed: make check installs it")
    stubs = Path(checker.origin).parent / "typeshed" / "stdlib"
    lacking: dict[str, list[str] | None] = {}
    for module in (*LIMITED, *ABSENT):
        path = stubs.joinpath(*module.split("."))
        path = path / "__init__.pyi" if path.is_dir() else path.with_suffix(".pyi")
        body = ast.parse(path.read_text()).body
        here, there = (names_in(body, system) for system in ("linux", platform))
        is_absent = platform == "win32" and module in ABSENT
        lacking[module] = None if is_absent else sorted(here - there)
    return lacking


def test_the_stubs_tell_what_a_system_lacks() -> None:
    windows, mac = lacking_on("win32"), lacking_on("darwin")
    assert {"fork", "killpg", "sched_getaffinity", "O_NOFOLLOW"} <= {*windows["os"]}
    assert {"SIGHUP", "SIGKILL"} <= {*windows["signal"]}
    assert "ForkServerContext" in windows["multiprocessing.context"]
    assert "sched_getaffinity" in mac["os"]
    assert "fork" not in mac["os"]
    assert not any(windows[module] for module in ABSENT)


def run_there(platform: str, place: Path, script: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-X", "warn_default_encoding", "-c", TAKEN_AWAY + script]
    return subprocess.run(
        [*words, json.dumps(lacking_on(platform))],
        cwd=place,
        env=os.environ | {"PYTHONIOENCODING": "cp1252", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        encoding="cp1252",
        timeout=200,
    )


@pytest.mark.parametrize(
    ("platform", "left_out"), [("win32", ""), ("darwin", "account kernels plan report")]
)
def test_files_are_read_and_steps_foretold_with_what_other_systems_have(
    platform: str, left_out: str, tmp_path: Path
) -> None:
    script = f"""
from tests.outside import COMMANDS, run_all
sys.exit(run_all([words for words in COMMANDS if words[0] not in {left_out.split()}]))
"""
    done = run_there(platform, tmp_path, script)
    assert done.returncode == 0, done.stderr


def test_windows_watches_loops_and_says_of_measuring_that_it_cannot(tmp_path: Path) -> None:
    script = """
import torch
from cs336 import cli, start, watch

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters())
with watch(model, optimizer, warmup_steps=1) as watched:
    for _ in range(3):
        with watched.step():
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    assert watched.report() is not None
for command in ("benchmark", "sweep", "ceilings", "ladder"):
    print(command, cli.main([command, "--device", "cpu"]))
"""
    done = run_there("win32", tmp_path, script)
    assert done.returncode == 0, done.stderr
    refused = [line for line in done.stderr.splitlines() if line == f"error: {LACKING}"]
    statuses = [line.split()[-1] for line in done.stdout.splitlines()[-len(refused) :]]
    assert statuses == ["1"] * 4
