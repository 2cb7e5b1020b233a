"""What the page says first: each number is that of the record that its link names, and little is said."""

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from cs336_systems.config import Device, OptimizerKind, Phase
from cs336_systems.costs.time import step_time
from cs336_systems.record import Measurement, WarningCode, load_records
from cs336_systems.report.page.contents import sweep_page
from cs336_systems.report.page.write import Linked, TableBlock, to_html
from cs336_systems.report.results import Results
from cs336_systems.report.sections.kernels.findings import findings
from cs336_systems.studies.ceilings_files import Ceilings
from tests.report.ceilings import make_rates
from tests.report.making import make_config, make_record
from tests.report.page.grid import GRID, grid_runs, grid_values

DATA = Path(__file__).parents[3] / "data" / "published"
MOST_SENTENCES = 12
PHASES = ("forward", "backward", "optimizer")


def page_of(directory):
    return sweep_page(Results.load(load_records(directory / "runs")[0], directory), directory)


def findings_of(page):
    """The blocks of the first chapter by their headings."""
    return {block.heading: block for block in page.chapters[0].blocks}


def text_of(sentence):
    return sentence.text if isinstance(sentence, Linked) else sentence[0]


@pytest.fixture(scope="module")
def grid():
    return page_of(GRID)


@pytest.fixture(scope="module")
def rows(grid):
    """The heading, and the size, context and precision, of each cell of the table of steps."""
    (table,) = (b for chapter in grid.chapters for b in chapter.blocks if isinstance(b, TableBlock))
    headings = [" ".join(f"{heading.name} {heading.unit}".split()) for heading in table.table.headings]
    return {
        f"{table.id}.{number}.{place}": (heading, tuple(row[:3]))
        for number, row in enumerate(table.table.rows)
        for place, heading in enumerate(headings)
    }


def one_with(word, block):
    """The only sentence of the block with this word."""
    (found,) = (sentence for sentence in block.paragraphs if word in text_of(sentence))
    return found


def links(sentence):
    return [(text, target) for text, target in sentence.parts if target]


def number_in(text):
    """The number in the words of a link, and the half of its last digit."""
    shown = re.search(r"[\d,]*\d(\.\d+)?", text)[0].replace(",", "")
    return float(shown), 0.5 * 10.0 ** -len(shown.partition(".")[2])


def test_the_grid_is_told_in_a_dozen_sentences(grid):
    assert 6 <= sum(len(block.paragraphs) for block in findings_of(grid).values()) <= MOST_SENTENCES


def test_every_number_of_a_sentence_is_that_of_the_run_that_its_link_names(grid, rows):
    values, seen = grid_values(), Counter()
    found = findings_of(grid)
    every = (*found["What limits each configuration"].paragraphs, *found["What stands out"].paragraphs)
    for sentence in (each for each in every if isinstance(each, Linked)):
        before = {target: sentence.parts[place + 1][0] for place, (_, target) in enumerate(sentence.parts) if target}
        for text, target in links(sentence):
            heading, key = rows[target]
            value = values[key][heading]
            if heading.partition(" ")[0] in PHASES:
                value /= values[key]["step ms"]
            scaled = value * (100 if "%" in text else 1)
            name = f"{key[0]} ctx {key[1]} {key[2]}"
            shown, half = number_in(text.removeprefix(name))
            assert shown == pytest.approx(scaled, abs=1.0001 * half), (sentence.text, text)
            assert name in text or name in before[target]
            seen[heading] += 1
    assert {"step ms", "backward ms", "MFU %", "std/mean %", "peak GiB"} <= seen.keys()


def test_what_stands_out_is_the_least_and_the_most_of_all_runs(grid, rows):
    values = grid_values()
    for sentence in findings_of(grid)["What stands out"].paragraphs:
        if not isinstance(sentence, Linked):
            continue
        (heading,) = {rows[target][0] for _, target in links(sentence)}
        known = {key: row[heading] for key, row in values.items() if row[heading] is not None}
        named = [rows[target][1] for _, target in links(sentence)]
        ends = [min(known, key=known.get), max(known, key=known.get)]
        assert named == (ends[1:] if heading == "std/mean %" else ends)


def test_what_launches_limit_are_the_runs_with_that_warning(grid, rows):
    warned = {key for key, run in grid_runs().items() if "launch-bound" in [w["code"] for w in run["warnings"]]}
    first, second, *_ = findings_of(grid)["What limits each configuration"].paragraphs
    assert {rows[target][1] for _, target in links(first)} == warned
    assert f"{len(warned)} of 30" in first.text
    assert f"the other {30 - len(warned)}" in second.text


def test_doubts_count_the_runs_of_each_warning_and_keep_every_one(grid):
    told = [warning for run in grid_runs().values() for warning in run["warnings"]]
    counts = Counter(warning["code"] for warning in told)
    counts.pop("launch-bound")  # no reason to doubt a time
    doubts = findings_of(grid)["What is in doubt"]
    found = {re.match(r"Warning (\S+) in (\d+) of 30 runs", text_of(each)).groups() for each in doubts.paragraphs}
    assert found == {(code, str(count)) for code, count in counts.items()}
    closed = [text_of(each) for each in doubts.more]
    assert len(closed) == len(told)
    assert all(any(warning["message"] in text for text in closed) for warning in told)


def test_the_worst_run_of_a_warning_on_the_spread_has_the_widest(grid, rows):
    values, runs = grid_values(), grid_runs()
    for sentence in findings_of(grid)["What is in doubt"].paragraphs:
        code = sentence.text.split()[1]
        if code in ("unstable", "outliers", "drift"):
            with_it = [key for key, run in runs.items() if code in [w["code"] for w in run["warnings"]]]
            ((_, target),) = links(sentence)
            assert rows[target][1] == max(with_it, key=lambda key: values[key]["std/mean %"])


def test_the_first_run_out_of_memory_is_told_with_what_it_asked_for():
    directory = DATA / "e2e_benchmark/out_of_memory"
    (failed,) = (r for path in (directory / "runs").glob("*.json") if (r := json.loads(path.read_text()))["failure"])
    page = page_of(directory)
    sentence = one_with("asked", findings_of(page)["What limits each configuration"])
    asked, free = (failed["failure"][f"{name}_bytes"] / 2**20 for name in ("requested", "free"))
    assert f"asked for {asked:.2f} MiB with {free:.2f} MiB free" in sentence.text
    ((name, target),) = links(sentence)
    assert failed["config"]["size"] in name
    assert target in to_html(page)


def test_profiled_runs_are_told_by_what_limits_them():
    directory = DATA / "nsys_profiles/train"
    busy, matmul = {}, {}
    for path in (directory / "kernels").glob("*.json"):
        profile = json.loads(path.read_text())
        busy[path.stem] = sum(sum(own["busy_s"]) for own in profile["phases"]) / sum(
            sum(own["wall_s"]) for own in profile["phases"]
        )
        times = Counter()
        for own in profile["classes"]:
            times[own["kind"]] += own["total_s"]
        matmul[path.stem] = times["matrix product"] / times.total()
    sentences = findings_of(page_of(directory))["What limits each configuration"].paragraphs
    told = [each for each in sentences if "profiled run" in text_of(each)]
    assert sum(int(re.search(r"(\d+) of 10", each.text)[1]) for each in told) == len(busy) == 10
    (last,) = (each for each in sentences if "class matrix product" in text_of(each))
    for values, every in ((matmul, [last]), (busy, told)):
        for sentence in every:
            for place, (text, target) in enumerate(sentence.parts):
                if target:
                    size, context = re.match(r" \((\S+) ctx (\d+)\)", sentence.parts[place + 1][0]).groups()
                    (key,) = (key for key in values if key.startswith(f"{size}_ctx{context}_"))
                    shown, half = number_in(text)
                    assert shown == pytest.approx(100 * values[key], abs=half)
    assert {number_in(text)[0] for text, _ in links(last)} == {
        float(f"{100 * end:.3g}") for end in (min(matmul.values()), max(matmul.values()))
    }


def test_the_largest_recorded_peak_is_told_with_what_it_consists_of():
    directory = DATA / "memory_profiles/first_step"
    peaks = [json.loads(path.read_text())["peak"] for path in (directory / "memory").glob("*.json")]
    largest = max(peaks, key=lambda peak: peak["allocated_bytes"])
    (sentence,) = (
        each for each in findings_of(page_of(directory))["What stands out"].paragraphs if "peak" in text_of(each)
    )
    assert links(sentence)[0][0] == f"{largest['allocated_bytes'] / 2**30:.2f} GiB"
    parts = Counter()
    for own in largest["categories"]:
        parts[own["category"]] += own["num_bytes"]
    for category, num_bytes in parts.most_common(3):
        assert (
            f"{category} {num_bytes / 2**30:.2f} GiB ({100 * num_bytes / largest['allocated_bytes']:.1f} %)"
            in sentence.text
        )


def test_one_profile_has_its_main_findings_first_and_the_others_closed():
    directory = DATA / "nsys_profiles/train"
    results = Results.load(load_records(directory / "runs")[0], directory)
    entry = max(results.kernels, key=lambda each: len(findings(each.profile, each.config)))
    texts = findings(entry.profile, entry.config)
    page = sweep_page(Results(records=results.records, kernels=[entry]), directory)
    told = [text_of(each) for each in findings_of(page)["What limits each configuration"].paragraphs]
    assert [text.endswith(texts[:3]) for text in told[-3:]] == [True] * 3
    assert not [text for text in told if text.endswith(texts[3:])]
    (own,) = (b for c in page.chapters for b in c.blocks if c.id == "kernels" and b.kind == "prose")
    assert [text for text, _ in (*own.paragraphs, *own.more)] == list(texts)
    assert 0 < len(own.more) == len(texts) - 3


def test_a_sweep_of_one_phase_or_without_times_says_nothing_of_phases(tmp_path):
    forward = [make_record(make_config(size), (0.02, 0.02)) for size in ("small", "medium")]
    only = [
        type(record)(config=record.config, status=record.status, started_at=record.started_at,
                     measurements=(Measurement(Phase.FORWARD, (0.02, 0.02)), record.measurements[-1]))
        for record in forward
    ]  # fmt: skip
    for records in (only, []):
        page = sweep_page(Results(records=records), tmp_path)
        texts = [
            text_of(each) for c in page.chapters[:1] for b in c.blocks if b.kind == "prose" for each in b.paragraphs
        ]
        assert not [text for text in texts if "longest phase" in text]
        to_html(page)


def test_the_checkpoints_with_the_least_peak_are_told_and_ringed(tmp_path):
    """Of 5, 6 and 8 GiB with a checkpoint for every 1, 2 and 4 blocks."""
    records = [
        make_record(make_config("xl", 512, checkpoint_blocks=blocks), (1.5 + blocks / 10,), peak_bytes=gib * 2**30)
        for blocks, gib in ((1, 5), (2, 6), (4, 8))
    ]
    page = sweep_page(Results(records=records), tmp_path)
    text, target = one_with("least peak", findings_of(page)["What stands out"])
    assert "least peak, 5.00 GiB, is that with a checkpoint for every block" in text
    assert target == "results"
    (figure,) = (b for chapter in page.chapters for b in chapter.blocks if "checkpoint_blocks" in getattr(b, "id", ""))
    (ring,) = [trace for trace in figure.spec["data"] if trace.get("name") == "least peak"]
    assert ring["y"] == [5]


@pytest.mark.parametrize(
    ("fields", "is_told"), [({}, True), ({"device": Device.CPU}, False), ({"sync_phases": True}, False)]
)
def test_launching_is_told_only_where_it_is_not_running(fields, is_told, tmp_path):
    """A CPU launches as long as it runs, and so does a host that waits for each phase."""
    done = make_record(make_config(), (0.02, 0.02))
    record = replace(done, config=replace(done.config, **fields), host_times_s=(0.01, 0.01))
    page = sweep_page(Results(records=[record]), tmp_path)
    told = [text_of(each) for each in findings_of(page)["What limits each configuration"].paragraphs]
    assert any("launched" in text for text in told) == is_told
    (run,) = (block for chapter in page.chapters for block in chapter.blocks if block.kind == "run")
    assert ("Launching a step" in dict(run.facts)) == is_told
    lines = [line["name"] for line in run.blocks[0].spec["data"]]
    assert any("launch" in name for name in lines) == is_told


def test_a_step_that_ends_with_the_host_is_not_said_to_run_on_after_it(tmp_path):
    """Its optimizer waits for launches, an eighth of the step, which is no reason to call the CPU its limit."""
    done = make_record(make_config(), (0.02, 0.02))
    host = tuple(Measurement(phase, (time_s, time_s)) for phase, time_s in
                 ((Phase.FORWARD, 0.001), (Phase.BACKWARD, 0.004), (Phase.OPTIMIZER, 0.0125)))  # fmt: skip
    page = sweep_page(Results(records=[replace(done, host_times_s=(0.02, 0.02), host_phases=host)]), tmp_path)
    (run,) = (block for chapter in page.chapters for block in chapter.blocks if block.kind == "run")
    assert dict(run.facts)["Launching a step"].endswith("of the host; the GPU waits for it in optimizer (2.500 ms)")
    told = [text_of(each) for each in findings_of(page)["What limits each configuration"].paragraphs]
    assert not any("launched" in text for text in told)


def test_advice_that_is_not_that_of_all_says_whose_it_is(tmp_path):
    """A run that is fused already cannot be helped by fusing."""
    codes = [WarningCode.LAUNCH_BOUND]
    plain = make_record(make_config("small"), (0.02,), codes=codes)
    fused = make_record(make_config("medium", optimizer=OptimizerKind.FUSED), (0.02,), codes=codes)
    for records, is_of_one in (([plain], False), ([plain, fused], True)):
        found = findings_of(sweep_page(Results(records=records), tmp_path))
        sentence = one_with("What helps", found["What limits each configuration"])
        assert "--optimizer fused" in sentence.text
        assert bool(re.search("What helps, for small", sentence.text)) == is_of_one


def test_a_step_far_from_its_forecast_stands_out_with_a_link_to_it(tmp_path):
    ceilings, config = Ceilings((make_rates(1e-3),)), make_config("tiny", 16)
    predicted_s = step_time(config, ceilings.curves("NVIDIA H200")).step_s
    page = sweep_page(Results(records=[make_record(config, [2 * predicted_s] * 3)]), tmp_path, ceilings)
    found = one_with("Slower than this device", findings_of(page)["What stands out"])
    assert found[1] == "results"
