"""The script's output says what was observed, and nothing is written unless asked."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cs336_systems.cli import precision as main
from cs336_systems.config import Device, Precision
from cs336_systems.report.sections.precision import (
    accumulation_section,
    dtype_section,
    interpret_accumulation,
    interpret_dtypes,
)
from cs336_systems.studies.precision import NORM_INPUT, NORM_OUTPUT, Accumulation, ObservedDtype, accumulation_study

FORMATS = ("csv", "md", "tex", "typ")


def observed(quantity: str, device: Device, precision: Precision, dtype: str) -> ObservedDtype:
    return ObservedDtype(model="ToyModel", device=device, precision=precision, quantity=quantity, dtype=dtype)


def test_sentences_on_sums_hold_the_observed_values() -> None:
    text = " ".join(interpret_accumulation(accumulation_study()))
    assert "The fp16 sum misses 10 by -0.0469, an fp32 sum of the same addends by +0.0021, all of it" in text
    assert "from storing 0.01 as 0.010002" in text
    assert "The bf16 sum stands still at 4 after 350 additions" in text
    assert "The fp16 sum stands still" not in text


def test_sentences_on_dtypes_follow_what_was_observed() -> None:
    rows = [
        observed(quantity, device, precision, dtype or precision.value)
        for quantity, device, dtype in [
            (NORM_INPUT, Device.CPU, ""), (NORM_OUTPUT, Device.CPU, ""),
            (NORM_INPUT, Device.CUDA, ""), (NORM_OUTPUT, Device.CUDA, "fp32"),
            ("loss", Device.CPU, "fp32"), ("loss", Device.CUDA, "fp32"),
        ]
        for precision in (Precision.FP16, Precision.BF16)
    ]  # fmt: skip
    assert interpret_dtypes(rows) == [
        "In fp32 in every case: loss.",
        "In the autocast type in every case: layer norm's input.",
        "fp16 and bf16 are used in the same places.",
        "In fp32 on cuda only: layer norm's output (ln).",
        "Layer norm on cpu: fp16 in, fp16 out.",
        "Layer norm on cpu: bf16 in, bf16 out.",
        "Layer norm on cuda: fp16 in, fp32 out.",
        "Layer norm on cuda: bf16 in, fp32 out.",
    ]
    assert "different places" in interpret_dtypes([*rows, observed("x", Device.CPU, Precision.BF16, "fp32")])[2]


def test_a_quantity_that_one_model_lacks_is_an_empty_cell() -> None:
    rows = [
        observed("a", Device.CPU, Precision.FP16, "fp16"),
        observed("b", Device.CPU, Precision.BF16, "bf16"),
    ]
    assert dtype_section(rows).tables[0].rows == (("ToyModel", "a", "fp16", ""), ("ToyModel", "b", "", "bf16"))


def test_sums_table_has_the_courses_four_first() -> None:
    results = [row[3] for row in accumulation_section(accumulation_study()).tables[0].rows]
    assert results[:4] == ["10.0001", "9.9531", "10.0021", "10.0021"]


def test_json_is_what_was_observed_unrounded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [Accumulation(**row) for row in printed["accumulation"]] == list(accumulation_study())
    assert {row["device"] for row in printed["dtypes"]} == {"cpu"}
    assert printed["gpu"] is None
    assert printed["torch"] == torch.__version__


def test_nothing_is_written_unless_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--device", "cpu"]) == 0
    assert "9.9531" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    assert main(["--device", "cpu", "--output", "deep/er"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("deep/er")
    written = {path.name for path in (tmp_path / "deep" / "er").iterdir()}
    tables = {f"{name}.{ending}" for name in ("accumulation", "dtypes") for ending in FORMATS}
    assert written == {*tables, "precision.json"}
    with (tmp_path / "deep/er/accumulation.csv").open(newline="") as file:
        totals = [float(row["total"]) for row in csv.DictReader(file)]
    assert totals == pytest.approx([row.total for row in accumulation_study()])


def test_an_output_that_cannot_be_made_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["--device", "cpu", "--output", str(tmp_path / "file")]) == 1
    assert str(tmp_path / "file") in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_asking_for_a_gpu_that_is_not_there_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cuda"]) == 2
    assert "--device cpu" in capsys.readouterr().err


def test_help_needs_no_torch() -> None:
    script = (
        "import sys; from cs336_systems.cli import precision as main\n"
        "try: main(['--help'])\n"
        "finally: assert 'torch' not in sys.modules"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "--output DIR" in run.stdout
