"""`cs336 account`: its numbers are those of the closed forms, and its rows add up."""

import re

import pytest

from cs336_systems.accounting import count_parameters
from cs336_systems.cli import main
from cs336_systems.commands.account import AccountArguments
from cs336_systems.config import SIZES, Precision
from cs336_systems.memory_model import Part, predict_memory
from cs336_systems.prediction.tape import Category
from cs336_systems.report.account import MIB, account_tables


def account(*words: str) -> int:
    return main(["account", *words])


def test_parameters_flops_and_memory_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert account("--size", "xl", "--context-length", "256") == 0
    said = capsys.readouterr().out
    assert f"{count_parameters(SIZES['xl']):,}" in said
    assert "6.250  MiB" in said, "4 x 256 x 1600 x 4 bytes of the residual stream"


def test_the_shown_parts_and_the_rest_are_the_peak() -> None:
    config = AccountArguments(size="small", context_length=128).config()
    _, peak, _ = account_tables(config, None, top=5)
    sizes = [float(row[3].replace(",", "")) for row in peak.rows]
    rest = float(re.search(r"hold ([\d,.]+) MiB", peak.notes[0])[1].replace(",", ""))
    assert len(sizes) == 5
    assert sum(sizes) + rest == pytest.approx(predict_memory(config).peak.allocated_bytes / MIB, rel=1e-3)


def test_adamw_takes_sixteen_bytes_a_parameter() -> None:
    config = AccountArguments(size="medium", context_length=128).config()
    peak, parameters = predict_memory(config).peak, count_parameters(config.model)
    state = peak.bytes_of(Category.PARAMETERS) + peak.bytes_of(Category.OPTIMIZER_STATE)
    assert state == pytest.approx(12 * parameters, rel=1e-3)


def test_what_fits_depends_on_the_memory(capsys: pytest.CaptureFixture[str]) -> None:
    answers = []
    for gib in ("8", "80"):
        assert account("--size", "medium", "--context-length", "256", "--fit", "--memory-gib", gib) == 0
        said = capsys.readouterr().out
        answers.append((re.search(r"this configuration\s+(\S.*?)\s*\n", said)[1],
                        int(re.search(r"largest batch at context 256\s+(\d+)", said)[1])))  # fmt: skip
    (small, few), (large, many) = answers
    assert (small, large) == ("does not fit", "fits")
    assert few < 4 <= many


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--size", "huge"], "unknown size"),
        (["--fit", "--memory-gib", "-1"], "--memory-gib"),
        (["--model", "a:b"], "model of your own"),
        (["--precision", "fp16", "--mixed-precision"], "--mixed-precision"),
    ],
)
def test_what_cannot_be_meant_is_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert account(*words) == 2
    assert said in capsys.readouterr().err


def test_what_is_not_predicted_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--attention", "sdpa", "--sdpa-backend", "flash", "--precision", str(Precision.FP32)]
    assert account(*flags) == 0
    assert "Not predicted" in " ".join(capsys.readouterr().out.split())


def test_a_part_is_a_row_of_its_own() -> None:
    config = AccountArguments(size="tiny").config()
    tables = account_tables(config, None, top=1000)
    parts: tuple[Part, ...] = predict_memory(config).peak.parts
    assert len(tables[1].rows) == len(parts)
