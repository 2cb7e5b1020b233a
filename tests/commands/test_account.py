"""`cs336 account`: what its flags mean, what it prints and writes, and what it refuses."""

import csv
import json
import re
from pathlib import Path

import pytest

from cs336.cli import main
from cs336.commands import account as command
from cs336.commands import machine
from cs336.commands.account import AccountArguments, device_meant
from cs336.commands.parse import parse
from cs336.config import SIZES
from cs336.costs.accounting import component_flops, count_parameters
from cs336.costs.hardware import DEVICES, find_device
from cs336.files import encode_json
from cs336.measure import nvml
from cs336.measure.nvml import Gpu
from cs336.report.words import SHIPPED
from cs336.studies.ceilings_rows import LaunchCell, LaunchKind, Stream
from tests.report.ceilings import lasting, make_ceilings, product_at, square, stream_at

GIB = 2**30


pytestmark = pytest.mark.usefixtures("here")


def account(*words: str | Path) -> int:
    return main(["account", "--details", *map(str, words)])


def test_what_fits_depends_on_the_memory(capsys: pytest.CaptureFixture[str]) -> None:
    answers = []
    for gib in ("3", "80"):
        assert (
            account("--size", "small", "--context-length", "256", "--fit", "--memory-gib", gib) == 0
        )
        said = capsys.readouterr().out
        verdict = {"3": "Does not fit", "80": "Fits"}[gib]
        assert said.startswith(verdict), "what was asked comes first"
        answers.append(
            (
                re.search(r"this configuration\s+(\S.*?)\s*\n", said)[1],
                int(re.search(r"largest batch at context 256\s+(\d+)", said)[1]),
            )
        )
    (small, few), (large, many) = answers
    assert (small, large) == ("does not fit", "fits")
    assert few < 4 <= many


def test_what_is_to_fit_this_machine_is_what_programs_can_have_of_its_smallest_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The driver keeps a GiB of the one to itself, and the other is smaller: as a sweep plans,
    so here.
    """
    sizes = ((80 * GIB, 79 * GIB), (24 * GIB, 23 * GIB))
    gpus = tuple(
        Gpu(
            index=i,
            uuid=f"GPU-{i}",
            name="NVIDIA X",
            memory_bytes=whole,
            usable_bytes=usable,
            driver="1",
        )
        for i, (whole, usable) in enumerate(sizes)
    )
    monkeypatch.setattr(nvml, "visible_gpus", lambda: gpus)
    assert account("--size", "tiny", "--fit") == 0
    assert "What fits 23.00 GiB" in capsys.readouterr().out
    monkeypatch.setattr(nvml, "visible_gpus", lambda: gpus[:1])
    assert account("--size", "tiny", "--fit") == 0
    assert "What fits 79.00 GiB" in capsys.readouterr().out


@pytest.mark.parametrize(
    "gpus",
    [(), (Gpu(index=0, uuid="u", name="X", memory_bytes=None, driver="1"),)],
    ids=["no GPU", "one that does not tell"],
)
def test_without_a_known_memory_the_flag_is_needed(
    gpus: tuple[Gpu, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nvml, "visible_gpus", lambda: gpus)
    assert account("--size", "tiny", "--fit") == 2
    assert "--fit needs --memory-gib" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--size", "huge"], "unknown size"),
        (["--fit", "--memory-gib", "-1"], "--memory-gib"),
        (["--fit", "--memory-gib", "nan"], "--memory-gib"),
        (["--memory-gib", "80"], "add --fit"),
        (["--model", "a:b"], "no module 'a'"),
        (["--precision", "fp16", "--mixed-precision"], "--mixed-precision"),
        (["--batch-size", str(10**18)], "--batch-size"),
        (["--checkpoint-blocks", "-1"], "--checkpoint-blocks"),
        (["--top", "0"], "--top"),
        (["--top", "-3"], "--top"),
        (
            ["--device-name", "A100"],
            "A100-SXM4-40GB, A100-PCIE-40GB, A100-SXM4-80GB, A100 80GB PCIe",
        ),
        (["--device-name", "H20"], "is not known; did you mean one of H200"),
        (["--device-name", "Gforce RTX 4090"], "GeForce RTX 4090"),
        (["--device-name", ""], "RTX A6000"),
        (["--device-name", "\x1b[2J\n" + "x" * 1000], "is not known"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_what_cannot_be_meant_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert account(*words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch(r"error: [^\n\x1b]+\n", printed.err)
    assert said in printed.err


@pytest.mark.parametrize(
    ("flags", "cause", "named"),
    [
        (
            ["--attention", "sdpa", "--sdpa-backend", "flash"],
            ["--precision", "fp32"],
            "flash attention computes in bf16",
        ),
        (["--fast"], ["--parallel", "fsdp2", "--ranks", "2"], "on 2 ranks"),
    ],
    ids=["fp32", "fast on ranks"],
)
def test_what_is_not_predicted_is_said_with_the_setting_that_is_the_reason(
    flags: list[str], cause: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    size = ["--size", "small", "--precision", "bf16", "--device-name", "H200"]
    assert account(*size, *flags) == 0
    assert "not foretold" not in capsys.readouterr().out
    assert account(*size, *flags, *cause) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(rf"Memory is not foretold: [^:]*{named}", said)


def test_a_fast_step_in_fp8_is_shorter_and_keeps_the_weights_in_it_besides(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A byte of each matrix of a block is kept for backward, less one of activations."""
    steps = {}
    for flags in ([], ["--fp8"]):
        words = ["--size", "xl", "--fast", *flags, "--device-name", "H200", "--json"]
        assert account(*words) == 0
        steps[bool(flags)] = json.loads(capsys.readouterr().out)
    assert steps[True]["time"]["step_s"] < steps[False]["time"]["step_s"]
    peaks = [steps[fp8]["memory"]["peak"]["allocated_bytes"] for fp8 in (False, True)]
    most_bytes = max(part["parameters"] or 0 for part in steps[True]["parts"])
    assert peaks[0] < peaks[1] < peaks[0] + most_bytes


def test_moments_in_bf16_take_half_of_the_memory_and_of_the_traffic(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """4 bytes less for each parameter, beside rests of blocks below 1 MiB that the allocator does
    not split, and 8 less to read and to write in a step, at most at the data sheet's bandwidth.
    """
    steps = []
    for flags in ([], ["--bf16-moments"]):
        words = ["--size", "large", "--fast", *flags, "--device-name", "H200", "--json"]
        assert account(*words) == 0
        steps.append(json.loads(capsys.readouterr().out))
    parameters = count_parameters(SIZES["large"])
    peaks = [step["memory"]["peak"]["allocated_bytes"] for step in steps]
    moments = 2 * 9 * SIZES["large"].num_layers
    assert 4 * parameters < peaks[0] - peaks[1] < 4 * parameters + moments * 2**20
    saved_s = steps[0]["time"]["step_s"] - steps[1]["time"]["step_s"]
    bandwidth = steps[0]["device"]["memory_bandwidth_bytes_per_s"]
    assert 8 * parameters / bandwidth < saved_s < 2 * 8 * parameters / bandwidth


def test_a_damaged_file_of_ceilings_is_said_and_costs_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "h200" / "ceilings.json"
    path.parent.mkdir()
    path.write_bytes(b"{")
    assert (
        account(
            "--size", "small", "--mixed-precision", "--device-name", "H200", "--ceilings", tmp_path
        )
        == 0
    )
    out, err = capsys.readouterr()
    assert "One step of" in out
    assert str(path) in err


@pytest.mark.parametrize("name", [name for device in DEVICES for name in device.names])
def test_every_known_device_can_be_named(name: str) -> None:
    for given in (name, f"NVIDIA {name}"):
        device = device_meant(given)
        assert device is not None
        assert name in device.names


def test_a_parameter_of_a_factory_is_told_as_such_and_not_as_a_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where a flag has its name: it would not help to give that flag."""
    (tmp_path / "asks_much.py").write_text("def make(vocab_size, memory_gib, foo): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert account("--model", "asks_much:make") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "needs `memory_gib`, `foo`" in error
    assert re.findall(r"--[a-z-]+", error) == ["--model"]


def test_a_format_without_a_directory_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert account("--size", "tiny", "--typ") == 2
    assert "--typ needs --output" in capsys.readouterr().err


def test_tables_and_numbers_are_written_where_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert account("--size", "tiny", "--output", str(tmp_path / "new" / "place"), "--tex") == 0
    printed = capsys.readouterr().out
    page = tmp_path / "new" / "place" / "index.html"
    assert printed.splitlines()[-1] == f"page: {page}"
    written = {path.name: path.read_text() for path in page.parent.iterdir()}
    assert set(written) == {"account.csv", "account.md", "account.tex", "index.html"}
    titles = re.findall(r"^### (.*)$", written["account.md"], re.MULTILINE)
    assert len(titles) >= 4
    assert all(title.split(" ")[0] in printed for title in titles)
    rows = list(csv.DictReader(written["account.csv"].splitlines()))
    assert [row["component"] for row in rows][-1] == "all"
    flops = sum(part.step for part in component_flops(AccountArguments(size="tiny").config()))
    assert int(rows[-1]["step_flops"]) == flops


@pytest.mark.parametrize(
    ("short", "name"),
    [
        ("4090", "GeForce RTX 4090"),
        ("rtx4090", "GeForce RTX 4090"),
        ("a6000", "RTX A6000"),
        ("h200", "H200"),
        ("nvidia h100 pcie", "H100 PCIe"),
        ("H100 SXM", "H100 80GB HBM3"),
        ("A100-SXM-80GB", "A100-SXM4-80GB"),
        ("V100-SXM2", "V100-SXM2-16GB"),
        ("L4", "L4"),
        ("a10", "A10"),
    ],
)
def test_a_short_name_means_the_one_device_that_it_can_mean(short: str, name: str) -> None:
    assert device_meant(short) is find_device(name) is not None


def step_of(said: str) -> tuple[float | None, bool]:
    """The predicted step in seconds, and whether it follows from measured ceilings."""
    found = re.search(r"Predicted time of a step.*?^step +(\S+)", said, re.MULTILINE | re.DOTALL)
    is_measured = "From the configuration and the ceilings of" in " ".join(said.split())
    return None if found is None else float(found[1].replace(",", "")) / 1e3, is_measured


def flops_of(*words: str) -> int:
    config = parse(AccountArguments, "account", [*words]).config()
    return sum(part.step for part in component_flops(config))


def ceilings_of(directory: Path, device_name: str, tflops: float = 1) -> Path:
    products = [product_at(square(side), tflops) for side in (64, 8192)]
    streams = [stream_at(1000, 2**28, stream) for stream in (Stream.COPY, Stream.ADAMW)]
    launches = [
        LaunchCell(launch=launch, timing=lasting(1e-6))
        for launch in (LaunchKind.EAGER, LaunchKind.GRAPH)
    ]
    directory.mkdir()
    study = make_ceilings(products, streams, launches, device_name=device_name)
    (directory / "ceilings.json").write_bytes(encode_json(study))
    return directory


@pytest.mark.usefixtures("one_rate")
def test_ceilings_give_the_time_of_a_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Products so slow that nothing else counts: the step takes its FLOPs over their rate. None
    is in fp32.
    """
    ceilings_of(tmp_path / "h200", "NVIDIA H200", tflops=1e-3)
    flags = ["--size", "small", "--device-name", "H200", "--ceilings", str(tmp_path)]
    assert account(*flags, "--mixed-precision") == 0
    assert step_of(capsys.readouterr().out) == (
        pytest.approx(flops_of("--size", "small") / 1e9, rel=0.01),
        True,
    )
    assert account(*flags, "--precision", "fp32") == 0
    assert not step_of(capsys.readouterr().out)[1]


def test_a_device_that_is_not_said_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is no GPU here, and the ceilings are of two."""
    monkeypatch.setattr(command, "first_gpu", lambda: None)
    for number, name in enumerate(("NVIDIA H200", "NVIDIA A30")):
        ceilings_of(tmp_path / str(number), name)
    assert account("--size", "tiny", "--mixed-precision", "--ceilings", tmp_path) == 0
    printed = capsys.readouterr()
    assert step_of(printed.out)[0] is None
    assert all(f'--device-name "{name}"' in printed.err for name in ("H200", "A30"))


def test_a_short_name_means_the_one_device_of_the_ceilings_that_it_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """H100 alone is the one whose ceilings come with the program, unless the user has measured
    another.
    """
    flags = ["--size", "tiny", "--mixed-precision", "--ceilings", tmp_path, "--device-name"]
    ceilings_of(tmp_path / "0", "NVIDIA H200")
    assert account(*flags, "h100") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "ceilings of H100 80GB HBM3" in said
    assert SHIPPED in said
    ceilings_of(tmp_path / "1", "NVIDIA H100 NVL")
    assert account(*flags, "h100") == 0
    assert "ceilings of H100 NVL" in " ".join(capsys.readouterr().out.split())
    for number, name in enumerate(("Own GPU 2", "Own GPU"), 2):
        ceilings_of(tmp_path / str(number), f"NVIDIA {name}", tflops=number)
    times_s = []
    for name in ("Own GPU 2", "Own GPU"):
        assert account(*flags, name) == 0
        times_s.append(step_of(capsys.readouterr().out)[0])
    assert times_s[0] > times_s[1], "a whole name means its own device alone"


@pytest.mark.usefixtures("one_rate")
@pytest.mark.parametrize("here", [None, "NVIDIA A30", "NVIDIA H100 80GB HBM3"])
def test_ceilings_of_one_device_that_are_asked_for_mean_that_device(
    here: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whatever GPU this machine has: its data sheet, its memory and its time. The memory of a
    GPU here is measured.
    """
    gpus = [
        Gpu(index=0, uuid="u", name=name, memory_bytes=23 * GIB, driver="1")
        for name in (here,)
        if name
    ]
    for module in (machine, nvml):
        monkeypatch.setattr(module, "visible_gpus", lambda: tuple(gpus))
    directory = ceilings_of(tmp_path / "h100", "NVIDIA H100 80GB HBM3", tflops=1e-3)
    assert account("--size", "tiny", "--mixed-precision", "--fit", "--ceilings", directory) == 0
    said = capsys.readouterr().out
    assert step_of(said)[0] == pytest.approx(flops_of("--size", "tiny") / 1e9, rel=0.01)
    assert f"What fits {23 if here == 'NVIDIA H100 80GB HBM3' else 80}.00 GiB" in said
    assert "the ceilings of H100 80GB HBM3 alone" in " ".join(said.split())
    unknown = ceilings_of(tmp_path / "own", "Own GPU")
    assert account("--size", "tiny", "--fit", "--ceilings", unknown) == 2
    assert "no data sheet says how much Own GPU has" in capsys.readouterr().err


def test_a_device_without_ceilings_takes_its_data_sheet_and_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of a large model nothing but the matmuls counts, at a share of the peak like an H200's."""
    flags = ["--size", "2.7B", "--batch-size", "32", "--mixed-precision", "--attention", "sdpa"]
    flags += ["--device-name", "B200", "--mode", "inference"]
    assert account(*flags) == 0
    said = capsys.readouterr().out
    step_s, is_measured = step_of(said)
    assert not is_measured
    assert 0.4 * 2250e12 < flops_of(*flags) / step_s < 0.7 * 2250e12
    assert "by its data sheet and the efficiencies of an H200" in " ".join(said.split())
    assert account("--size", "tiny", "--device-name", "B200") == 0
    assert step_of(capsys.readouterr().out)[0] is None, "its fp32 is in no data sheet"


@pytest.mark.parametrize(
    ("words", "has_time"),
    [
        (["--device-name", "H200"], True),
        (["--device-name", "B200", "--precision", "fp32"], False),
        (["--device-name", "H100", "--parallel", "fsdp", "--ranks", "8"], True),
        (["--device-name", "RTX 4090", "--parallel", "fsdp", "--ranks", "8"], False),
        (["--device-name", "H100", "--precision", "fp16"], False),
    ],
    ids=lambda value: str(value)[-30:],
)
def test_a_named_device_has_a_time_or_the_reason_why_not(
    words: list[str], has_time: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """No fp32 rate of a B200 is known, nor how 8 cards without NVLink are joined; fp16 waits for
    its scaler.
    """
    assert main(["account", "--size", "tiny", *words]) == 0
    said = capsys.readouterr().out
    assert ("A step takes" in said) is has_time
    assert ("not foretold: " in said) is not has_time
