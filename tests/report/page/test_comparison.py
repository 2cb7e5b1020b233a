"""The page of a comparison says what its rows say, and what each side is."""

import json
import re
import shlex
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from cs336_systems.config import Profiler
from cs336_systems.record import WarningCode
from cs336_systems.report.compared import Sides, compare_paths, compare_sides, load_compared
from cs336_systems.report.page.collection import Collection
from cs336_systems.report.page.commands import command_for
from cs336_systems.report.page.comparison import comparison_chapters
from cs336_systems.report.page.write import Linked, Page, Prose, to_html
from tests.report.making import HOSTILE, make_config, make_failure, make_record
from tests.report.page.pages import HOSTILE_TEXTS
from tests.report.page.parsed import Parsed

DATA = Path(__file__).parents[3] / "data/published/e2e_benchmark"
PATHS = {"A": DATA / "train_fp32", "B": DATA / "train_bf16"}
SETTINGS = ("size", "context")
ELSEWHERE = ("there/a", "there/b")
"""Where records that were not measured for the comparison would be."""


def sentences(chapters):
    """The sentences of the first chapter by heading, those that are closed too."""
    blocks = [block for block in chapters[0].blocks if isinstance(block, Prose)]
    return {
        block.heading: [each.text if isinstance(each, Linked) else each[0] for each in (*block.paragraphs, *block.more)]
        for block in blocks
    }


def chapters_of(found):
    return comparison_chapters(Collection(root=Path("x"), comparisons={Path(): found}), Path())


def compared(a, b, **options):
    return compare_sides(Sides(a="one", b="two", records=ELSEWHERE, **options), [a, b])


@pytest.fixture(scope="module")
def page():
    found = compare_paths(Sides(a="fp32", b="bf16", records=ELSEWHERE), list(PATHS.values()))
    return Parsed(to_html(Page(title="x", chapters=chapters_of(found))))


def step_times_s(path):
    """The steps of the run of each size and context in the directory of a sweep."""
    runs = [json.loads(file.read_text()) for file in (path / "runs").glob("*.json")]
    return {
        (run["config"]["size"], str(run["config"]["model"]["context_length"])): next(
            each["times_s"] for each in run["measurements"] if each["phase"] == "step"
        )
        for run in runs
    }


def numbers_in(text):
    """The numbers of a text, each with the half of its last digit."""
    found = [number.replace(",", "") for number in re.findall(r"\d[\d,]*(?:\.\d+)?", text)]
    return [(float(number), 0.5001 * 10.0 ** -len(number.partition(".")[2])) for number in found]


def test_every_row_is_what_the_runs_of_both_sides_say(page):
    times = {side: step_times_s(path) for side, path in PATHS.items()}
    rows = page.rows("comparison")
    assert {tuple(row[name][0] for name in SETTINGS) for row in rows} == set(times["A"])
    assert len(rows) == 15
    for row in rows:
        key = tuple(row[name][0] for name in SETTINGS)
        mean_s = {side: statistics.fmean(own[key]) for side, own in times.items()}
        ratio = mean_s["B"] / mean_s["A"]
        low, high = (number for number, _ in numbers_in(row["interval"][0]))
        wanted = {f"step of {s} ms": (1e3 * mean_s[s], 1e3 * statistics.stdev(times[s][key])) for s in times}
        wanted |= {"B / A": (ratio,), **{f"processes of {s}": (1,) for s in times}}
        assert row.keys() == {*SETTINGS, *wanted, "interval", "B is"}
        for heading, values in wanted.items():
            shown = numbers_in(row[heading][0])
            assert len(shown) == len(values)
            for value, (number, half) in zip(values, shown, strict=True):
                assert number == pytest.approx(value, abs=half), (key, heading)
            assert float(row[heading][1]) == pytest.approx(values[0])
        verdict = "faster" if high < 1 else "slower" if low > 1 else "cannot tell"
        assert row["B is"][0] == verdict
        assert low < ratio < high


def test_the_numbers_of_sentences_are_those_of_the_cells_that_they_link_to(page):
    linked = [(text, target) for text, target in page.links if target in page.cells and "ctx" not in text]
    assert len(linked) > 2
    for text, target in linked:
        ((number, half),) = numbers_in(text)
        assert number == pytest.approx(float(page.cells[target][1]), abs=half)


def test_of_each_verdict_the_least_and_the_largest_ratio_are_told():
    ratios = {128: 0.5, 256: 0.25, 512: 1.5, 1024: 3.0, 64: 1.0}
    a = [make_record(make_config(context_length=context), [0.1] * 5) for context in ratios]
    b = [
        make_record(make_config(context_length=context, precision="bf16"), [0.1 * ratio] * 5)
        for context, ratio in ratios.items()
    ]
    faster, slower, neither = sentences(chapters_of(compared(a, b)))["Verdict"]
    assert [re.findall(r"([\d.]+) \(.*?ctx (\d+)", each) for each in (faster, slower)] == [
        [("0.250", "256"), ("0.500", "128")], [("1.50", "512"), ("3.00", "1024")],
    ]  # fmt: skip
    assert [re.search(r"in (\d) of 5", each)[1] for each in (faster, slower, neither)] == ["2", "2", "1"]


def test_what_is_missing_failed_or_in_doubt_is_named():
    a = [make_record(make_config(size), [0.1] * 3) for size in ("small", "medium", "large")]
    b = [
        make_record(make_config("small", seed=1), [0.1, 0.3, 0.2], codes=[WarningCode.UNSTABLE]),
        make_failure(make_config("medium", seed=1)),
        make_record(make_config("xl", seed=1), [0.1] * 3),
    ]
    found = sentences(chapters_of(compared(a, b)))
    ((doubt,),) = (own for heading, own in found.items() if "doubt" in heading)
    assert ("small" in doubt, "unstable" in doubt) == (True, True)
    missing = [text for text in found["Verdict"] if "small" not in text]
    for name, words in (("large", "Only A"), ("xl", "Only B"), ("medium", "B: out of memory")):
        assert [words in text for text in missing if name in text] == [True]


def test_what_else_may_be_the_reason_is_said_where_it_was_allowed():
    a, other = (make_record(make_config(warmup_steps=steps), [0.1] * 3) for steps in (5, 2))
    identity = replace(other.environment.identity, driver="999", code="def")
    b = replace(other, environment=replace(other.environment, identity=identity))
    every = sentences(chapters_of(compared([a], [b], allow_mixed=True)))
    text = " ".join(every["What else may be the reason"])
    for word in ("driver 580 and 999", "code abc and def", "5 warm-up", "had 2"):
        assert word in text
    alike = sentences(chapters_of(compared([a], [a])))
    assert "What else may be the reason" not in alike
    assert "999" in " ".join(every["What A and B are"])
    assert "one" in alike["What A and B are"][0]


def test_runs_under_a_profiler_are_left_out_and_counted():
    plain, profiled = (
        make_record(make_config(profiler=profiler), [step_s] * 3)
        for profiler, step_s in ((Profiler.NONE, 0.1), (Profiler.NSYS, 0.3))
    )
    found = compared([plain, profiled], [profiled, plain])
    assert [row["ratio"] for row in found.rows] == [1]
    assert [text[:5] for text in sentences(chapters_of(found))["What is left out"]] == ["1 run"] * 2
    with pytest.raises(ValueError, match="A has times under a profiler"):
        compared([profiled], [plain])


def test_two_configurations_have_their_verdict_first():
    sides = [
        [make_record(make_config(seed=seed, repeat=2 * i + seed), [mean_s + i / 1e4] * 3) for i in range(5)]
        for seed, mean_s in ((0, 0.1), (1, 0.2))
    ]
    chapters = chapters_of(compare_sides(Sides(a="--seed 0", b="--seed 1"), sides))
    assert "B is slower than A" in sentences(chapters)["Verdict"][0]
    assert "--seed 1" in " ".join(sentences(chapters)["What A and B are"])


MADE = re.findall(r"`(cs336 compare .*?)`", (DATA.parent / "README.md").read_text())


@pytest.mark.parametrize("made", MADE)
def test_the_command_is_the_one_that_made_the_committed_comparison(made):
    words = shlex.split(made)
    at = words.index("--name")
    (found,) = (load_compared(path.parent) for path in DATA.parent.glob(f"*/{words[at + 1]}/comparison.json"))
    told = command_for(Collection(root=DATA, comparisons={Path(words[at + 1]): found}), Path(words[at + 1]))
    assert shlex.split(told) == words


@pytest.mark.parametrize("name", [HOSTILE, *HOSTILE_TEXTS])
def test_no_name_of_a_side_is_markup(name):
    a, b = ([make_record(make_config(model_factory=own), [s] * 3)] for own, s in (("a:b", 0.1), ("c:d", 0.2)))
    found = compare_sides(Sides(a=name, b=name, records=ELSEWHERE), [a, b])
    page = to_html(Page(title=name, chapters=chapters_of(found)))
    shown = page.partition("<body")[2].partition("<script")[0]
    assert not re.search(r"<(img|style|script)|onerror=\"|javascript:[^&]*'>", shown)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e\u2028]", page)
