"""`cs336 report FILE`: the page of one file of any program, and what becomes of it later."""

import json
import re
import webbrowser
from pathlib import Path

import pytest

from cs336.analysis.memory.explain import explain_memory
from cs336.cli import main
from cs336.commands.file_page import page_directory
from cs336.commands.rebuild import report_file
from cs336.report.progress import StatusLine
from tests.analysis.kernels.tracing import Recording, training, write_export
from tests.analysis.memory.programs import Training
from tests.report.page.parsed import Parsed, as_written

pytestmark = pytest.mark.usefixtures("no_pictures", "here")

STEPS = 3


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages go below the current directory."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_export(tmp_path / "mine.sqlite", training(STEPS))


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    run = Training()
    for step in range(2):
        run.step(step)
    return run.end(tmp_path)


def report(*words: object) -> int:
    return main(["report", *map(str, words)])


def written(directory: Path) -> dict[str, bytes]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


@pytest.mark.parametrize("command", ["kernels", "memory"])
def test_a_page_stands_beside_what_the_command_writes(
    command: str, trace: Path, snapshot: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = trace if command == "kernels" else snapshot
    assert main([command, str(file), "--output", "beside", "--typ"]) == 0
    answer = capsys.readouterr().out.partition("\n")[0]
    assert report(file, "--typ") == 0
    *_, said, named = capsys.readouterr().out.splitlines()
    page = Path(named.removeprefix("page: "))
    assert page == Path("data/files") / file.stem / "index.html"
    assert answer.startswith(said)
    assert f"{page.parent.name}</title>" in page.read_text()
    made = written(page.parent)
    beside = written(Path("beside"))
    assert b"beside</title>" in beside.pop("index.html")
    assert {"index.html", "file.txt"} == made.keys() - beside.keys()
    assert all(made[name] == data for name, data in beside.items())


def test_numbers_of_the_page_are_those_of_the_trace(trace: Path) -> None:
    recording = training(STEPS)
    assert report(trace) == 0
    page = as_written(Path("data/files/mine/index.html").read_text())
    rows = {row["phase"][0]: row for row in Parsed(page).rows("phases")}
    kernel_ms = sum(kernel.duration_ns for kernel in recording.kernels) / STEPS / 1e6
    assert float(rows["step"]["kernels"][1]) == len(recording.kernels) / STEPS
    assert float(rows["step"]["GPU time ms"][1]) == pytest.approx(kernel_ms, rel=1e-6)
    tiles = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd><dd", page))
    assert float(tiles["kernels"]) == pytest.approx(len(recording.kernels) / STEPS, abs=0.005)
    assert float(tiles["time of kernels"].removesuffix(" ms")) == pytest.approx(kernel_ms, rel=1e-3)


def test_the_tiles_of_a_snapshot_have_its_peak_and_what_was_reserved(snapshot: Path) -> None:
    assert report(snapshot) == 0
    page = Path("data/files", snapshot.stem, "index.html").read_text()
    tiles = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd><dd", page))
    explained = explain_memory(snapshot)
    for name, num_bytes in (
        ("peak", explained.peak.allocated_bytes),
        ("reserved", explained.peak_reserved_bytes),
    ):
        number, unit = tiles[name].split()
        assert float(number) * {"MiB": 2**20, "GiB": 2**30}[unit] == pytest.approx(
            num_bytes, rel=1e-2
        )


def test_the_page_of_a_kept_profile_of_memory_has_the_numbers_of_its_json(
    snapshot: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the profile is called: a page of its own, and all of it in the tables."""
    assert main(["memory", str(snapshot), "--output", "beside"]) == 0
    kept = json.loads(Path("beside/memory.json").read_text())
    Path("beside/memory.json").rename("mine.txt")
    assert report("mine.txt") == 0
    page = Path("data/files/mine.txt/index.html").read_text()
    tiles = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd><dd", page))
    for name, num_bytes in (
        ("peak", kept["peak"]["allocated_bytes"]),
        ("reserved", kept["peak_reserved_bytes"]),
    ):
        number, unit = tiles[name].split()
        assert float(number) * {"MiB": 2**20, "GiB": 2**30}[unit] == pytest.approx(
            num_bytes, rel=1e-2
        )
    assert json.loads(Path("data/files/mine.txt/memory.json").read_text()) == kept
    capsys.readouterr()


_SWAPPED = {
    ("memory.json", "profile.json"): "this is a kernel profile",
    ("profile.json", "memory.json"): "this is a memory profile",
    ("ladder.json", "memory.json"): "this is a memory profile",
    ("precision.json", "profile.json"): "this is a kernel profile",
}


@pytest.mark.parametrize("swapped", _SWAPPED)
def test_results_under_another_name_are_named_as_what_they_are(
    swapped: tuple[str, str], trace: Path, snapshot: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each reader of results gets a file that another one reads."""
    for command, file in (("kernels", trace), ("memory", snapshot)):
        assert main([command, str(file), "--output", "made"]) == 0
    name, content = swapped
    Path("wrong").mkdir()
    Path("wrong", name).write_bytes(Path("made", content).read_bytes())
    capsys.readouterr()
    assert report("wrong") == 1
    error = capsys.readouterr().err
    assert f"wrong/{name}: {_SWAPPED[swapped]}" in error


def test_a_study_is_no_old_profile_of_memory(capsys: pytest.CaptureFixture[str]) -> None:
    study = Path(__file__).parents[2] / "data/published/precision/precision.json"
    Path("wrong").mkdir()
    Path("wrong/memory.json").write_bytes(study.read_bytes())
    assert report("wrong") == 1
    error = capsys.readouterr().err
    assert "not a memory profile" in error
    assert "version" not in error


def test_files_of_one_name_have_pages_of_their_own_and_one_file_keeps_its_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = []
    for number in (1, 2, 3):
        folder = tmp_path / f"run{number}"
        folder.mkdir()
        files.append(write_export(folder / "t.sqlite", training(number)))
    assert main(["kernels", str(files[2]), "--output", "data/files/t"]) == 0
    kept = written(Path("data/files/t"))
    for _ in range(2):
        for file in files:
            assert report(file) == 0
    assert written(Path("data/files/t")) == kept, "somebody else's output stays as it was"
    assert sorted(path.name for path in Path("data/files").iterdir()) == ["t", "t-2", "t-3", "t-4"]
    capsys.readouterr()


@pytest.mark.parametrize(
    "name",
    ["..json", ".json.gz", "a b.pt.trace.json.gz", "é.pickle", "x" * 250, "-.zip", "a/../..json"],
)
def test_a_page_is_below_its_folder_under_a_plain_name(name: str, tmp_path: Path) -> None:
    directory = page_directory(tmp_path / name, tmp_path / "pages")
    assert directory.parent == tmp_path / "pages"
    assert re.fullmatch(r"\w[\w.+-]{0,99}", directory.name, re.ASCII)


def test_pages_are_made_again_and_listed(
    trace: Path, snapshot: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in (trace, snapshot):
        assert report(file) == 0
    before = written(Path("data/files"))
    assert report("data") == 0
    assert written(Path("data/files")) == before
    page = Path("data/index.html").read_text()
    links = re.findall(r'<a class="entry" href="(.*?)">', page)
    assert links == [f"files/{name}/index.html" for name in (trace.stem, snapshot.stem)]
    capsys.readouterr()


def test_the_page_is_shown_where_a_browser_is(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda address: bool(shown.append(address)))
    assert report(trace, "--open") == 0
    page = Path("data/files/mine/index.html").resolve()
    assert shown == [page.as_uri()]
    assert "data/files/mine/index.html" in capsys.readouterr().err, "no browser could be started"


@pytest.mark.parametrize("command", ["kernels", "memory"])
def test_the_last_line_of_a_command_is_the_path_of_its_page(
    command: str, tmp_path: Path, snapshot: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_export(tmp_path / "a b.sqlite", training(1))
    if command == "memory":
        file = snapshot.rename(tmp_path / "a b.pickle")
    assert main([command, str(file)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "page: data/files/a-b/index.html"
    made = Path("data/files/a-b/index.html").read_bytes()
    assert report(str(file)) == 0
    assert Path("data/files/a-b/index.html").read_bytes() == made
    assert main([command, str(file), "--json"]) == 0
    assert "page: " not in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("content", [b"", b"\x80", b"{}", b"[1]", b"no profile"])
def test_a_file_of_another_kind_has_no_page(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "f.json").write_bytes(content)
    assert report("f.json") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: f.json: ")
    assert not Path("data").exists()


def test_a_trace_without_anything_has_a_page(tmp_path: Path) -> None:
    with StatusLine() as status:
        page = report_file(write_export(tmp_path / "empty.sqlite", Recording()), status)
    assert page.is_file()
