"""Readers and rules for names of kernels that come from outside: by entry points and from files."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cs336.analysis.kernels.classes import KernelClass, classify_kernel, use_rules
from cs336.analysis.kernels.explain import explain
from cs336.cli import main
from tests.analysis.kernels.kineto_files import events_of, write_trace
from tests.analysis.kernels.tracing import Kernel, Recording, Span
from tests.plugins import install

SOURCE = """
from dataclasses import replace

from cs336.analysis.kernels.classes import KernelRules
from cs336.analysis.kernels.readers import Reader
from cs336.analysis.kernels.readers.kineto import read_kineto


def read(path):
    return replace(read_kineto(path), device_names=("of the plug-in",))


READER = Reader(
    needed="a trace of the plug-in",
    recognises=lambda path, head: path.suffix == ".mine",
    read=read,
)
RULES = KernelRules({"^mine_": "normalisation", "softmax": "other", "triton_poi": "optimizer"})
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = {"cs336.readers": "READER", "cs336.kernel_rules": "RULES"}
    install(monkeypatch, tmp_path, SOURCE, points)


@pytest.fixture(autouse=True)
def no_rules_are_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield
    monkeypatch.undo()  # the plug-in is gone
    use_rules()


def write(path: Path) -> Path:
    """One step with a kernel of a name that no rule of this program knows."""
    kernels = [Kernel("mine_special", 10, start_ns=100)]
    spans = [Span("step", 0, 1000), Span("forward", 1, 900)]
    return write_trace(path, events_of(Recording(kernels=kernels, spans=spans)))


@pytest.mark.usefixtures("plugin")
def test_a_reader_comes_before_ours_for_the_files_that_it_recognises(tmp_path: Path) -> None:
    """The file is JSON, which the reader for torch.profiler would take too."""
    assert explain(write(tmp_path / "a.mine")).device_names == ("of the plug-in",)
    assert explain(write(tmp_path / "a.json")).device_names == ("NVIDIA H200",)


def test_a_file_that_nobody_reads_names_what_the_plugin_reads(
    plugin: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a").write_bytes(b"neither")
    assert main(["kernels", str(tmp_path / "a")]) == 2
    assert "a trace of the plug-in, or " in capsys.readouterr().err


@pytest.mark.usefixtures("plugin")
def test_rules_given_come_before_those_of_plugins_and_these_before_ours(tmp_path: Path) -> None:
    (kernel,) = {row.kind for row in explain(write(tmp_path / "a.json")).kernels}
    assert kernel is KernelClass.NORMALISATION
    # our rules for torch.compile and for words, both overruled
    assert classify_kernel("triton_poi_fused_add_0") is KernelClass.OPTIMIZER
    assert classify_kernel("softmax_warp_forward") is KernelClass.OTHER
    assert classify_kernel("ampere_sgemm_128x64_tn") is KernelClass.MATMUL


def test_rules_of_a_file(plugin: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text("'^mine_' = \"fused attention\"\n'mine' = \"softmax\"\n")
    trace = write(tmp_path / "a.json")
    assert main(["kernels", str(trace), "--rules", str(rules), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {row["kind"] for row in told["kernels"]} == {"fused attention"}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("'(' = \"softmax\"", "'('"),
        ("'a' = \"attention!\"", "attention!"),
        ('a.b = "softmax"', "softmax"),
        ("a", "Expected '='"),
        ("\udcff", "utf-8"),
        (None, "No such file"),
    ],
)
@pytest.mark.parametrize("command", ["kernels", "report"])
def test_a_bad_file_of_rules_is_refused_in_one_line(
    command: str, text: str | None, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = tmp_path / "rules.toml"
    if text is not None:
        rules.write_bytes(text.encode(errors="surrogateescape"))
    subject = write(tmp_path / "a.json") if command == "kernels" else tmp_path
    assert main([command, str(subject), "--rules", str(rules)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(rules) in line
    assert named in line


def test_a_bad_plugin_is_refused_in_one_line_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, tmp_path, "RULES = {'a': 'softmax'}", {"cs336.kernel_rules": "RULES"})
    assert main(["kernels", str(write(tmp_path / "a.json"))]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "some-plugin" in line
