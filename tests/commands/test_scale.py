"""`cs336 scale`: its tables hold the formulas and the forecast; what is not known is refused."""

import csv
import re
from pathlib import Path

import pytest

from cs336.cli import main
from cs336.commands import account
from cs336.costs.scale import PARALLEL, Scheme
from cs336.files import encode_json
from cs336.studies.ceilings_files import REFERENCE
from cs336.studies.ceilings_records import LaunchCell, LaunchKind, Stream
from tests.report.ceilings import (
    CollectiveCell,
    lasting,
    make_ceilings,
    product_at,
    square,
    stream_at,
)

GIVEN = [
    "--size",
    "8B",
    "--ranks",
    "8",
    "64",
    "1024",
    "--gpus-per-node",
    "8",
    "--network-gb-per-s",
    "50",
]
MIB = 2**20


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This machine has none, and no ceilings."""
    monkeypatch.setattr(account, "first_gpu", lambda: None)
    monkeypatch.chdir(tmp_path)


def scale(*words: str | Path) -> int:
    return main(["scale", *map(str, words)])


def written(directory: Path) -> list[dict[str, str]]:
    """The rows of the forecast."""
    with (directory / "scale.csv").open() as file:
        return list(csv.DictReader(file))


def ceilings_at(directory: Path, spread: float = 0.0, **fields: object) -> Path:
    """Ceilings of a device that reaches 800 TFLOP/s in bf16, and 200 GB/s on the bus among two.

    The slowest loop of a product takes `spread` longer than the fastest.
    """
    products = [product_at(square(side), 800, spread=spread) for side in (512, 1024, 2048, 16384)]
    streams = [stream_at(4000, 2**30, stream) for stream in (Stream.COPY, Stream.ADAMW)]
    launches = [
        LaunchCell(launch=launch, timing=lasting(1e-6))
        for launch in (LaunchKind.EAGER, LaunchKind.GRAPH)
    ]
    reductions = [
        CollectiveCell(num_bytes=64 * MIB, world_size=2, timing=lasting(64 * MIB / 200e9))
    ]
    directory.mkdir()
    study = make_ceilings(products, streams, launches, reductions, **fields)
    (directory / "ceilings.json").write_bytes(encode_json(study))
    return directory


def test_every_way_has_its_most_ranks_and_what_is_measured_its_forecast(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = ceilings_at(tmp_path / "h200")
    assert scale(*GIVEN, "--ceilings", directory) == 0
    said = capsys.readouterr().out
    for scheme in Scheme:
        assert re.search(rf"^{re.escape(scheme)}: .* [\d,]+$", said, re.MULTILINE)
    for scheme in PARALLEL:
        assert len(re.findall(rf"^{scheme} +[\d,]+ +[\d.]+ ", said, re.MULTILINE)) == 3
    assert "How to Scale Your Model" in said


def test_the_most_ranks_and_the_parts_of_a_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By hand: C / W is 800e12 / 200e9 = 4000 tokens in a node."""
    directory = ceilings_at(tmp_path / "h200")
    assert scale(*GIVEN, "--ceilings", directory, "--output", tmp_path) == 0
    tokens = 1024 * 4 * 512
    most = f"{int(tokens / 4000 * 8 / 7) // 8 * 8:,}"
    assert re.search(rf"^fsdp: .* {most}$", capsys.readouterr().out, re.MULTILINE)
    steps = written(tmp_path)
    assert [each["ranks"] for each in steps] == ["8", "64", "1024"] * 2
    for each in steps:
        parts = [float(each[f"{name}_ms"]) for name in ("compute", "slowed", "exposed")]
        assert float(each["step_ms"]) == pytest.approx(sum(parts))
        assert 0 < parts[-1] < sum(parts) < 10_000


@pytest.mark.parametrize(("spread", "is_in_doubt"), [(0.001, False), (0.5, True)])
def test_times_from_ceilings_in_doubt_are_marked(
    spread: float, is_in_doubt: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The step and what it is made of, of which the note says what the mark means."""
    directory = ceilings_at(tmp_path / "h200", spread)
    assert scale("--size", "tiny", "--ranks", "2", "--ceilings", directory) == 0
    (row,) = re.findall(r"^ddp +2 .*", capsys.readouterr().out, re.MULTILINE)
    assert row.count("?") == (4 if is_in_doubt else 0), "step, computing, slowed and exposed"


def test_a_data_sheet_is_marked_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    assert scale("--device-name", "B200", "--size", "tiny") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "data sheet" in said
    assert REFERENCE in said


def test_what_does_not_fit_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Parameters, gradients, two moments: 4 x 4 bytes of 7.96e9 parameters each are 118.6 GiB;
    an eighth of it fits.
    """
    words = ["--ranks", "8", "--output", str(tmp_path)]
    large = ["--size", "8B", "--context-length", "512", "--batch-size", "2"]
    assert scale(*words, *large, "--device-name", "H100 80GB HBM3") == 0
    found = {each["way"]: each for each in written(tmp_path)}
    assert {way: each["fits"] for way, each in found.items()} == {"ddp": "False", "fsdp": "True"}
    assert float(found["ddp"]["peak_gib"]) > 118.6
    assert re.search(r"^ddp on 8 does not fit.* 80 GiB", capsys.readouterr().out, re.MULTILINE)
    assert (
        scale(*words, "--size", "tiny", "--device-name", "V100-SXM2-32GB", "--precision", "fp32")
        == 0
    )
    assert {each["fits"] for each in written(tmp_path)} == {""}, (
        "boards of that row differ in memory"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "needed --device-name"),
        (["--device-name", "4090"], "--node-gb-per-s"),
        (["--device-name", "B200", "--precision", "fp32"], "nothing is known of B200 at fp32"),
        (["--device-name", "H200", "--ranks", "16"], "--network-gb-per-s"),
        (
            ["--device-name", "H200", "--ranks", "12", "--network-gb-per-s", "50"],
            "does not fill nodes",
        ),
        (["--device-name", "H200", "--ranks", "0"], "--ranks"),
        (["--device-name", "H200", "--gpus-per-node", "0"], "--gpus-per-node"),
        (["--device-name", "H200", "--network-gb-per-s", "nan"], "--network-gb-per-s"),
        (["--device-name", "H200", "--node-gb-per-s", "-1"], "--node-gb-per-s"),
        (["--device-name", "H200", "--precision", "fp16"], "fp16"),
        (["--device-name", "H200", "--model", "a:b"], "model of your own"),
        (["--device-name", "H200", "--size", "huge"], "unknown size"),
    ],
    ids=lambda value: repr(value)[-40:],
)
def test_what_cannot_be_answered_is_refused_in_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert scale(*words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch(r"error: [^\n]+\n", printed.err)
    assert said in printed.err
