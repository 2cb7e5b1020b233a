"""Whatever is typed, a command ends with one line and the right exit status, never with a
traceback.
"""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from cs336 import cli
from cs336.commands.parse import flag_names, parse

LONG = "9" * 320
NUMBERS = (
    "0",
    "1",
    "-1",
    "3",
    "16",
    "1.5",
    "1e5",
    "1e400",
    "nan",
    "inf",
    "-inf",
    LONG,
    f"-{LONG}",
    f"1e{LONG}",
    "9" * 5000,
    "0x10",
    "1_000",
    "",
    " ",
    "80GB",
    "7B",
    "70GiB",
    "1K",
    "K",
    "e9",
    "1e9",
    "2T",
    "\u0663",
    f"{2**63}",
    "1e-9",
)
WORDS = (
    "help",
    "--help",
    "-h",
    "--help-all",
    "--",
    "-",
    "---",
    "--=",
    "--no-such",
    "-x",
    "tiny",
    "8B",
    "cpu",
    "fp32",
    "train",
    "naive",
    "sdpa",
    "H100",
    "x" * 5000,
    "nothing/there",
    ".",
    "/dev/null",
    "\udc80",
    "\x1b[31m",
    "a\nb",
    "{}",
    "$(x)",
    "%s",
    "a b",
    "--size tiny",
    "mine:make",
    "none",
    "bf16",
    "ddp",
    "fsdp",
    "2.7B",
    "gpt2",
)
DRAWN = int(os.environ.get("CS336_COMMAND_LINES", "150"))


@pytest.fixture
def nothing_is_run(monkeypatch: pytest.MonkeyPatch, here: object) -> None:
    """A command line without a fault ends where it would begin to measure or to trace."""

    def begins(*_: object, **__: object) -> None:
        raise SystemExit(0)

    for name in (
        "benchmark._measure",
        "compare.measure_all",
        "ladder.measure_all",
        "sweep.measure_all",  # after those that import it
        "study.show_study",
    ):
        monkeypatch.setattr(f"cs336.commands.{name}", begins)
    monkeypatch.setattr("cs336.sweep.run.measure_one", begins)
    monkeypatch.setattr("cs336.costs.traces.importlib", SimpleNamespace(import_module=begins))
    monkeypatch.setattr("cs336.costs.traces.subprocess", SimpleNamespace(run=begins))


def drawn(chance: random.Random) -> list[str]:
    """A command, mostly an existing one, with some of its flags; most of their values are of the
    right type.
    """
    command = chance.choice(cli.COMMANDS)
    kind = cli._arguments(command)
    names = sorted(flag_names(kind))
    words = [chance.choice([command] * 9 + [*WORDS[:4]])]
    for _ in range(chance.randrange(6)):
        flag = f"--{chance.choice(names).replace('_', '-')}"
        for _ in range(chance.choice([0, 8, 8, 8])):
            value = chance.choice([*NUMBERS, *WORDS])
            try:
                parse(kind, command, [*(["a", "b"] if command == "compare" else []), flag, value])
            except (ValueError, SystemExit):
                continue
            words += [flag, value]
            break
        else:
            value = chance.choice([*NUMBERS, *WORDS])
            words += chance.choice([[flag, value], [f"{flag}={value}"], [flag], [value]])
    return words


def test_no_command_line_is_answered_by_a_traceback(
    nothing_is_run: None, capsys: pytest.CaptureFixture[str]
) -> None:
    chance = random.Random(int(os.environ.get("CS336_FAULT_SEED", "6")))
    statuses = []
    for _ in range(DRAWN):
        words = drawn(chance)
        try:
            status = cli.main(words)
        except SystemExit as end:
            status = end.code or 0
        except BaseException as error:
            raise AssertionError(words) from error
        said = capsys.readouterr().err
        assert status in (0, 1, 2, 130), words
        assert "Traceback" not in said, words
        if status:
            assert said.splitlines()[-1].startswith("error: "), (words, said)
            assert len([line for line in said.splitlines() if line.startswith("error: ")]) == 1, (
                words,
                said,
            )
        statuses.append(status)
    assert statuses.count(0) > DRAWN / 20


ROOT = Path(__file__).parents[2]
PROFILE = next((ROOT / "data/published/nsys_profiles/train/kernels").glob("small_ctx128*.json"))


@pytest.mark.parametrize(
    ("line", "status", "num_lines"),
    [
        ("account --memory-gib 80GB", 2, 1),
        ("plan --tokens 7B --gpus none", 2, 1),
        (f"account --batch-size {LONG}", 2, 1),
        ("compare --help-all", 0, 0),
        ("help", 0, 0),
        ("sweep help", 0, 0),
        ("account --size no 2>/dev/full", 2, 0),
        ("account --size tiny >/dev/full", 1, 1),
        ("sweep --help >/dev/full", 1, 1),
        ("account --size tiny | head -1", 0, 1),
    ],
)
def test_how_it_ends(line: str, status: int, num_lines: int, here: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONUNBUFFERED", None)
    words = ["bash", "-o", "pipefail", "-c", f"'{sys.executable}' -m cs336 {line}"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == status, done.stderr
    assert len(done.stderr.splitlines()) == num_lines, done.stderr


def test_what_an_encoding_lacks_is_escaped_and_json_stays_json() -> None:
    words = [sys.executable, "-m", "cs336", "kernels", str(PROFILE)]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
    }
    tables = subprocess.run(words, env=environment, capture_output=True, timeout=100)
    assert (tables.returncode, tables.stderr) == (0, b"")
    assert "\\u00b5s" in tables.stdout.decode("ascii")
    done = subprocess.run([*words, "--json"], env=environment, capture_output=True, timeout=100)
    assert (
        json.loads(done.stdout.decode("ascii"))["kernels"]
        == json.loads(PROFILE.read_bytes())["kernels"]
    )
