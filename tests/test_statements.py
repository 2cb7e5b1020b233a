"""Published tables are, to the byte, what the code makes of the records; documents say what both have, README what
is printed. The forecasts of the published runs are made once for all.
"""

import re
import shlex
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest

from cs336_systems import cli
from cs336_systems.commands.flags import parse
from cs336_systems.commands.rebuild import FOLDER, load, score_forecast, write
from cs336_systems.record import load_records
from cs336_systems.report.page.chapters import Directory, headline_of, times_of
from cs336_systems.report.progress import StatusLine
from cs336_systems.report.terminal import print_run
from cs336_systems.studies.ceilings_files import load_ceilings
from tests.committed import DATA, committed_directories
from tests.statements import h100 as h100  # whose claims are registered with its import
from tests.statements import parallel as parallel
from tests.statements.documents import CLAIMS, ROOT, Claim, TableClaim, read, some, table, unclaimed
from tests.statements.results import METHOD, README, RESULTS

Load = Callable[[Path], Directory]
INPUTS = ("runs", "kernels", "memory", "examples")
"""Folders of what was measured and explained; JSON files are such too."""
COMMITTED = (".csv", ".md")
OF_OTHERS = ("nvtx_kern_sum_small_ctx512.csv", "by_hand_or_traced.csv")
"""Tables of another program, and of an earlier version of this one."""


def outputs(directory: Path) -> dict[str, bytes]:
    """The tables of a results directory that are published, by name."""
    return {
        path.name: path.read_bytes()
        for path in directory.iterdir()
        if path.suffix in COMMITTED and path.name not in OF_OTHERS
    }


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Reads a copy of a results directory once; the copies of all of them, without tables, are beside each other."""
    data = tmp_path_factory.mktemp("published") / "data"
    for path in (path for directory in committed_directories() for path in directory.iterdir()):
        made = data / path.relative_to(DATA)
        made.parent.mkdir(parents=True, exist_ok=True)
        if path.name in INPUTS:
            made.symlink_to(path)
        elif path.suffix == ".json":
            shutil.copy(path, made)
    ceilings_at = cache(load_ceilings)
    return cache(lambda directory: load(data / directory.relative_to(DATA), ceilings_at))


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("directory", committed_directories(), ids=lambda path: str(path.relative_to(DATA)))
def test_committed_tables_are_those_of_the_committed_records(directory: Path, loaded: Load) -> None:
    own = loaded(directory)
    given = {path.name: path.read_bytes() for path in own.path.glob("*.json")}
    with StatusLine() as status:
        write(own, status)
    assert {path.name: path.read_bytes() for path in own.path.glob("*.json")} == given
    committed, made = outputs(directory), outputs(own.path)
    assert sorted(made) == sorted(committed)
    assert [name for name, text in made.items() if text != committed[name]] == []


@pytest.mark.usefixtures("no_pictures")
def test_committed_errors_of_the_forecast_are_those_of_all_committed_records(loaded: Load) -> None:
    first, *_ = committed_directories()
    root = loaded(first).path.parents[len(first.relative_to(DATA).parts) - 1]
    with StatusLine() as status:
        score_forecast([*map(loaded, committed_directories())], root, status)
    assert outputs(root / FOLDER) == outputs(DATA / FOLDER)


def expected_rows(key: str, rows: Sequence[Mapping[str, str]]) -> set[int]:
    """The rows among which an extreme of this column must be, by the table alone: all that answer the question."""
    known = {index for index, row in enumerate(rows) if row[key]}
    if key == "speed_up":
        return {index for index in known if rows[index]["version"] != "eager"}
    if "gate" in rows[0]:
        return {index for index in known if rows[index]["gate"] == "passed"}
    if key == "together_mean_ms":
        shapes = {i: (int(rows[i]["context_length"]), int(rows[i]["d_head"])) for i in known}
        alike = {i: {j for j in known if rows[j]["precision"] == rows[i]["precision"]} for i in known}
        return {i for i in known if shapes[i] == max(shapes[j] for j in alike[i])}
    return known


def busy_by_clock(directory: Path, runs: Sequence[Mapping[str, str]]) -> list[tuple[float, bool]]:
    """Of each profiled step the busy time over the clock's step, and whether the clock's run was launch-bound."""
    found = []
    for profiled in some(table(f"{directory.relative_to(DATA)}/phases.csv"), phase="step"):
        (run,) = [row for row in runs if all(row[key] == profiled[key] for key in row.keys() & profiled.keys())]
        share = float(profiled["busy_mean_ms"]) / float(run["step_mean_ms"])
        found.append((share, "launch-bound" in run["warnings"]))
    return found


@pytest.mark.parametrize("directory", committed_directories(), ids=lambda path: str(path.relative_to(DATA)))
def test_a_headline_says_what_the_published_tables_have(directory: Path, loaded: Load) -> None:
    """All numbers, the rows that they stand on and the failures, worked out again from the CSV files."""
    own = loaded(directory)
    told = headline_of(own, [] if own.sweep is None else times_of(own.sweep))
    names = [name for name in ("results", "comparison", "ladder", "dtypes") if (directory / f"{name}.csv").exists()]
    tables = [table(f"{directory.relative_to(DATA)}/{name}.csv") for name in names]
    numbers = [float(text.replace(",", "")) for text in re.findall(r"\d[\d,]*(?:\.\d+)?", f"{told.text} {told.more}")]
    covered: dict[str, set[int]] = {}
    for claim in told.claims:
        said = claim.value * (100 if claim.key == "busy_share" else 1)
        assert claim.key == "verdict" or any(number == pytest.approx(said, rel=5e-3) for number in numbers), claim
        if claim.key in ("limit", "busy_share"):
            continue
        rows = next(rows for rows in tables if claim.key in rows[0])
        if claim.kind == "count":
            of = "" if claim.of is None else str(claim.of)
            assert claim.rows == tuple(i for i, row in enumerate(rows) if of in row[claim.key].split(";")), claim
        else:
            values = [float(rows[index][claim.key]) for index in claim.rows]
            assert claim.value == pytest.approx((min if claim.kind == "least" else max)(values), rel=1e-8), claim
            covered[claim.key] = covered.get(claim.key, set()) | {*claim.rows}
    for key, rows_of_claims in covered.items():
        assert rows_of_claims == expected_rows(key, next(rows for rows in tables if key in rows[0])), key
    failed = Counter(row["status"] for row in tables[0] if row.get("status", "ok") != "ok")
    assert {str(claim.of): claim.value for claim in told.claims if claim.key == "status"} == failed
    assert told.claims or names == ["dtypes"]
    if shares := busy_by_clock(directory, tables[0]) if (directory / "phases.csv").exists() else []:
        limits = {claim.of: claim.value for claim in told.claims if claim.key == "limit"}
        assert sum(limits.values()) == len(shares)
        assert limits["the GPU"] == sum(share >= 0.8 and not is_named for share, is_named in shares)
        extremes = [claim.value for claim in told.claims if claim.key == "busy_share"]
        assert extremes == pytest.approx([min(shares)[0], max(shares)[0]], rel=1e-6)
    if names == ["dtypes"]:
        quantities = {row["quantity"]: True for row in tables[0]}
        for row in tables[0]:
            quantities[row["quantity"]] &= row["dtype"] == "fp32"
        assert told.text.partition(": ")[2].rstrip(".").split(", ") == [
            name for name, is_so in quantities.items() if is_so
        ]


DOCUMENTS = (README, RESULTS)

SETTINGS = (
    r"two configurations|three (?:lines|steps)",
    r"Python 3\.\d+ or newer",
    r"\b(?:batch|context) \d+",
    r"between two synchronisations",
    r"\b[Oo](?:n|f) two\b",
    r"\d+ x \d+",
    "2026 leaderboard",
    "FlashAttention 4",
    r"ZeRO stage 1",
    r"assignment 2",
    r"a multiply-add counts as two",
    r"et al\. \d{4}",
    r"With `--repeats`, three or more",
    r"a 95 % confidence interval",
)
"""Numbers that were chosen, not found; all others have a claim in tests/statements/."""


@pytest.mark.parametrize("claimed", CLAIMS, ids=[f"{item.compute.__wrapped__.__name__}" for item in CLAIMS])
def test_the_document_says_what_the_file_has(claimed: Claim | TableClaim) -> None:
    assert list(claimed.problems(read(claimed.document))) == []


def test_readme_is_read_in_one_breath() -> None:
    assert len((ROOT / README).read_text().split()) <= 1200


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_figure_has_a_source(document: str) -> None:
    assert unclaimed(document, read(document), SETTINGS) == []


@pytest.mark.parametrize("document", [*DOCUMENTS, METHOD, "data/published/README.md", "CONTRIBUTING.md"])
def test_what_is_linked_is_there(document: str) -> None:
    text = (ROOT / document).read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert ((ROOT / document).parent / target).exists(), target


SCRIPTS = {"python benchmark.py": "benchmark", "python benchmark_sweep.py": "sweep", "sweep": "sweep"}
COMMAND = re.compile(rf"(?m)(?:^|`|\$ )((?:{'|'.join(map(re.escape, SCRIPTS))}|cs336 [a-z]+) [^`#\n]*)")


@pytest.mark.parametrize("document", [*DOCUMENTS, METHOD])
def test_commands_are_spelt_as_the_program_takes_them(document: str) -> None:
    text = (ROOT / document).read_text()
    commands = COMMAND.findall(text)
    assert commands
    for command in commands:
        script = next((script for script in SCRIPTS if command.startswith(f"{script} ")), None)
        name, words = (SCRIPTS[script], command[len(script) :]) if script else command.split(" ", 2)[1:]
        argv = shlex.split(words)
        if argv and argv != ["--help"] and "..." not in command:
            argv = [f" {word}" if name == "compare" and word.startswith("--size ") else word for word in argv]
            parse(cli._arguments(name), command, argv)  # prints what is wrong, and exits


SHOWN = re.findall(r"```console\n\$ ([^\n]*)\n(.*?)```", (ROOT / README).read_text(), re.DOTALL)
"""Commands of README with what they print."""


@pytest.mark.parametrize(("command", "shown"), SHOWN, ids=[command for command, _ in SHOWN])
def test_a_command_prints_what_readme_shows(
    command: str, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(ROOT)
    if command.startswith("cs336 benchmark "):
        print_committed_run(command)
    else:
        program, *argv = shlex.split(command)
        assert (program, cli.main(argv)) == ("cs336", 0)
    printed = "\n" + "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
    parts = f"\n{shown.rstrip()}".split("\n…\n")
    assert re.search(r"\n(?:.*\n)*?".join(map(re.escape, parts)), printed), printed


def print_committed_run(command: str) -> None:
    """What `cs336 benchmark` printed of the run of this command, which README links to."""
    directory = Path("data/published/e2e_benchmark/train")
    assert f"]({directory}/)" in read(README)
    (record,) = (
        record
        for record in load_records(directory / "runs")[0]
        if command
        == f"cs336 benchmark --size {record.config.size} --context-length "
        f"{record.config.model.context_length} --mixed-precision"
        and record.config.precision == "bf16"
    )
    print_run(record, directory / "runs" / f"{record.key}.json", load_ceilings(Path("data/published/ceilings")))
