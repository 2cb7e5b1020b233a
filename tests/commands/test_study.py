"""`cs336 attention`, `fusion`, `ceilings` and `precision`: what they measure, print, write and
refuse.
"""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from cs336.cli import main, precision
from cs336.commands import study as command
from cs336.commands.outcome import FAILED, OK
from cs336.commands.parse import parse
from cs336.commands.study import CeilingsArguments, layer_shapes, run
from cs336.config import SIZES, Device
from cs336.measure.nvml import Gpu
from cs336.record import Status
from cs336.studies import runner
from cs336.studies.ceilings_files import load_ceilings
from cs336.studies.ceilings_records import CeilingsStudy, ProductPrecision
from cs336.studies.ceilings_rows import ProductCell, Shape, Stream
from cs336.studies.operators import Version
from cs336.studies.precision import accumulation_study
from cs336.studies.records import read_study
from tests.report.ceilings import lost, make_ceilings, square, stream_at
from tests.report.page.parsed import Parsed
from tests.report.studies import (
    Implementation,
    make_cell,
    make_failed,
    make_fusion,
    make_lost_row,
    make_result,
    make_row,
    make_study,
)

pytestmark = pytest.mark.usefixtures("no_pictures")


def attention_of(ended: Status):
    return make_study(
        make_result(make_cell()), make_failed(make_cell(Implementation.FLASH), status=ended)
    )


def fusion_of(ended: Status):
    return make_fusion(make_row(), replace(make_lost_row(version=Version.FUSED), status=ended))


@pytest.mark.parametrize(
    ("ended", "status"),
    [(Status.OOM, 0), (Status.UNAVAILABLE, 0), (Status.CRASHED, 1), (Status.TIMEOUT, 1)],
)
@pytest.mark.parametrize(
    ("command", "study_of"), [("attention", attention_of), ("fusion", fusion_of)]
)
def test_a_cell_that_crashed_is_exit_status_1(
    command: str,
    study_of,
    ended: Status,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "run_study", lambda *_: study_of(ended))
    assert main([command, "--device", "cpu", "--output", str(tmp_path)]) == status


@pytest.mark.parametrize(
    ("command", "study_of"), [("attention", attention_of), ("fusion", fusion_of)]
)
def test_a_study_ends_with_naming_its_page_which_has_its_tables(
    command: str,
    study_of,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(runner, "run_study", lambda *_: study_of(Status.OOM))
    assert main([command, "--device", "cpu", "--name", "mine", "--output", str(tmp_path)]) == 0
    page = tmp_path / command / "mine" / "index.html"
    assert capsys.readouterr().out.splitlines()[-1] == f"page: {page}"
    assert "results.0.0" in Parsed(page.read_text()).cells
    made = page.read_bytes()
    page.unlink()
    assert main(["report", str(page.parent)]) == 0
    assert page.read_bytes() == made


pytestmark = pytest.mark.usefixtures("no_pictures")

TINY = (
    "--device cpu --sizes 16 32 --presets --precisions fp32 --memory-mib 1 --step-presets "
    "--loops 2 --loop-s 0.001"
)


def parsed(*words: object) -> CeilingsArguments:
    return parse(CeilingsArguments, "cs336 ceilings", [str(word) for word in words])


def test_a_cpu_is_measured_and_its_ceilings_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(parsed(*TINY.split(), "--output", tmp_path, "--tex", "--typ")) == OK
    printed = capsys.readouterr().out
    for words in (
        "Ceilings of",
        "Matrix multiplications, fp32",
        "Passes over memory",
        "Launches",
        "32 x 32 x 32",
    ):
        assert words in printed
    directory = tmp_path / "ceilings" / "cpu"
    study = read_study(directory / "ceilings.json", CeilingsStudy)
    assert [cell.shape.rows for cell in study.products] == [16, 32]
    assert {cell.stream for cell in study.streams} == set(Stream)
    ceiling = load_ceilings(directory.parent).flops_per_s(study.device_name, ProductPrecision.FP32)
    assert ceiling == max(cell.flops_per_s for cell in study.products)
    assert {"results.md", "products.csv", "bandwidth.tex", "launches.typ"} <= {
        p.name for p in directory.iterdir()
    }


def test_a_failure_is_an_exit_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for status, expected in ((Status.OOM, OK), (Status.CRASHED, FAILED)):
        cell = ProductCell(
            precision=ProductPrecision.FP32, shape=square(16), timing=lost(status, "it broke")
        )
        study = make_ceilings([cell], [stream_at(2)])
        monkeypatch.setattr(runner, "run_study", lambda *_, study=study: study)
        assert run(parsed(*TINY.split(), "--output", tmp_path)) == expected
        assert read_study(tmp_path / "ceilings" / "cpu" / "ceilings.json", CeilingsStudy) == study


def test_flags_mean_a_grid() -> None:
    grid = parsed("--device", "cpu").grid()
    assert (grid.device, grid.loop_s, grid.world_size) == (Device.CPU, 0.005, 1)
    assert grid.precisions == (ProductPrecision.FP32, ProductPrecision.BF16)
    assert grid.shapes[0] == Shape(rows=64, inner=64, columns=64)
    assert grid.shapes[-1] == Shape(rows=4 * 512, inner=128, columns=512, name="tiny feed-forward")
    assert grid.stream_bytes == (2**20, 2**24, 2**26, 2**27)
    assert (grid.step_presets, grid.step_contexts) == (("tiny",), (64, 128, 256)), (
        "those of a sweep on a CPU"
    )
    chosen = parsed(
        "--device",
        "cpu",
        "--sizes",
        7,
        "--presets",
        "xl",
        "--precisions",
        "fp16",
        "--world-size",
        2,
    ).grid()
    assert chosen.shapes == (
        Shape(rows=7, inner=7, columns=7),
        Shape(rows=2048, inner=1600, columns=6400, name="xl feed-forward"),
    )
    assert (chosen.precisions, chosen.world_size) == ((ProductPrecision.FP16,), 2)


def test_flags_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(index=0, uuid="GPU-0", name="NVIDIA H200 (of mine)", memory_bytes=1, driver="1")
    gpus = (gpu, replace(gpu, index=1, uuid="GPU-1"))
    for module in ("cs336.commands.study", "cs336.commands.machine"):
        monkeypatch.setattr(f"{module}.visible_gpus", lambda: gpus)
    grid = parsed().grid()
    assert (grid.device, grid.world_size, grid.precisions) == (
        Device.CUDA,
        2,
        tuple(ProductPrecision),
    )
    assert [
        shape.rows for shape in grid.shapes if shape.rows == shape.inner == shape.columns
    ] == list(command.USUAL_CEILINGS[Device.CUDA]["sizes"])
    assert parsed().directory() == Path("data/ceilings/NVIDIA-H200-of-mine")
    assert parsed("--world-size", 1).grid().world_size == 1
    with pytest.raises(ValueError, match="--world-size 3 needs as many GPUs, this process sees 2"):
        parsed("--world-size", 3).grid()


def test_an_unaligned_head_is_also_measured_padded() -> None:
    shapes = {shape.name: shape for shape in layer_shapes(["small", "gpt2", "gpt2"])}
    assert list(shapes) == [
        "small feed-forward",
        "gpt2 feed-forward",
        "gpt2 head",
        "gpt2 head, padded",
    ]
    head, padded = shapes["gpt2 head"], shapes["gpt2 head, padded"]
    assert (head.rows, head.inner, head.columns) == (4 * 1024, 768, SIZES["gpt2"].vocab_size)
    assert (padded.columns % 128, 0 < padded.columns - head.columns < 128) == (0, True)
    assert replace(padded, columns=head.columns, name=head.name) == head


def test_ceilings_of_an_earlier_study_are_kept_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, directory = (
        [*TINY.split(), "--output", tmp_path, "--name", "mine"],
        tmp_path / "ceilings" / "mine",
    )
    first, second = make_ceilings([], [stream_at(2)]), make_ceilings([], [stream_at(3)])
    for study in (first, second):
        monkeypatch.setattr(runner, "run_study", lambda *_, study=study: study)
        assert run(parsed(*words)) == OK
    (kept,) = directory.glob("ceilings-before-*.json")
    assert read_study(kept, CeilingsStudy) == first
    assert load_ceilings(directory.parent).studies == (second,)


FORMATS = ("csv", "md")


def test_nothing_is_written_unless_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert precision(["--device", "cpu"]) == 0
    assert "9.9531" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    assert precision(["--device", "cpu", "--output", "deep/er"]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "results: deep/er",
        "page: deep/er/index.html",
    ]
    written = {path.name for path in (tmp_path / "deep" / "er").iterdir()}
    tables = {
        f"{name}.{ending}"
        for name in ("accumulation", "layer_norm", "dtypes")
        for ending in FORMATS
    }
    assert written == {*tables, "precision.json", "index.html"}
    with (tmp_path / "deep/er/accumulation.csv").open(newline="") as file:
        totals = [float(row["total"]) for row in csv.DictReader(file)]
    assert totals == pytest.approx([row.total for row in accumulation_study()])
