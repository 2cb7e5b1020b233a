"""What a watched loop says of itself to trackers, notebooks, scripts and a budget."""

import json
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from cs336 import watch
from cs336.analysis.limits import OverBudgetError
from cs336.config import Phase
from cs336.record import RunWarning, WarningCode
from cs336.report.answer import LONGEST, answer_of

WARMUP, STEPS = 2, 12


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


@pytest.fixture
def watched(tmp_path):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = watch(model, optimizer, warmup_steps=WARMUP, output=tmp_path)
    made.train = lambda steps: train(made, model, optimizer, steps)
    yield made
    made.remove()


def train(watched, model, optimizer, steps):
    for _ in range(steps):
        tokens = torch.randint(11, (4, 8))
        with watched.step():
            cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()


def test_metrics_are_flat_and_of_measured_steps(watched):
    watched.train(WARMUP)
    assert watched.metrics() == {}
    watched.train(STEPS)
    metrics, record = watched.metrics(), watched.record()
    assert all(type(value) is float for value in metrics.values())
    assert metrics["watch/step_ms"] == pytest.approx(1e3 * record.measurement(Phase.STEP).mean_s)
    loop_s = sum(record.measurement(Phase.STEP).times_s) + sum(record.between_s)
    assert metrics["watch/tokens_per_s"] == pytest.approx(STEPS * 4 * 8 / loop_s)
    assert watched.metrics() == {}


class Cells(HTMLParser):
    """Checks that elements are closed in order, and collects the texts of cells."""

    def __init__(self):
        super().__init__()
        self.open, self.texts = [], []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1] in ("td", "th"):
            self.texts.append(data)


def test_a_notebook_has_the_table(watched):
    assert "0 of 2" in watched._repr_html_()
    watched.train(WARMUP + STEPS)
    cells = Cells()
    cells.feed(watched._repr_html_())
    cells.close()
    assert cells.open == []
    assert {"mine", "tokens/s"} < set(cells.texts)


def test_the_report_names_the_page_that_it_wrote(watched, capsys):
    watched.train(WARMUP + STEPS)
    path = watched.report()
    page = path.parents[1] / "index.html"
    assert f"page: {page}" in capsys.readouterr().out
    assert "mine" in page.read_text()
    answer = watched.answer()
    assert (answer["record"], answer["page"]) == (str(path), str(page))


def test_a_page_that_cannot_be_written_fails_no_loop(watched, capsys):
    watched.train(WARMUP + STEPS)
    (watched.directory / "index.html").mkdir(parents=True)
    assert watched.report().is_file()
    assert "no page" in capsys.readouterr().err
    assert "page" not in watched.answer()


def test_an_answer_is_short_whatever_the_record_says(watched):
    watched.train(WARMUP + STEPS)
    answer, record = watched.answer(), watched.record()
    assert answer["statistics"]["step"]["min_s"] == pytest.approx(
        min(record.measurement(Phase.STEP).times_s), rel=1e-4
    )
    assert answer["measured_steps"] == STEPS
    hostile = RunWarning(code=WarningCode.NOT_SEEN, message='"\x1b[31m\\ü' * 10_000)
    answer = answer_of(replace(record, warnings=(hostile,) * 50))
    text = json.dumps(answer)
    # a token of JSON has 2.5 characters at the least, so that these are 2,000
    assert len(text) <= 5_000
    assert "\x1b" not in text
    assert all(len(warning["message"]) <= LONGEST for warning in answer["warnings"])
    assert answer["statistics"]["step"]


def test_a_budget_fails_a_loop_only_beyond_its_interval(watched, monkeypatch):
    everything = {"step_ms": 1e-6, "tokens_per_s": 1e12, "mfu": 1, "peak_gib": 1e-9}
    assert watched.budget(**everything) == []
    watched.train(WARMUP + 9)
    assert {verdict.is_kept for verdict in watched.budget(**everything)} == {None}
    watched.train(STEPS)
    record, steps = watched.record(), 9 + STEPS

    def with_steps(times_s):
        """Let the loop's steps have taken these times, whatever else the machine did."""
        measurements = []
        for measurement in record.measurements:
            if measurement.phase is Phase.STEP:
                measurement = replace(measurement, times_s=tuple(times_s))
            measurements.append(measurement)
        changed = replace(record, measurements=tuple(measurements), between_s=(0.0,) * steps)
        monkeypatch.setattr(type(watched), "record", lambda _: changed)

    with_steps([0.002, 0.003] * (steps // 2) + [0.002] * (steps % 2))
    watched.budget(step_ms=1e6, tokens_per_s=1e-6)
    for name in ("step_ms", "tokens_per_s"):
        with pytest.raises(OverBudgetError, match=name):
            watched.budget(**{name: everything[name]})
    # no MFU and no GPU here
    assert [verdict.is_kept for verdict in watched.budget(mfu=1, peak_gib=1e-9)] == [None, None]
    # one step took so long that the mean may lie on either side: t * deviation > mean - limit
    with_steps([0.002] * (steps - 1) + [2.0])
    assert [verdict.is_kept for verdict in watched.budget(step_ms=1)] == [None]
    with pytest.raises(ValueError, match="step_ms"):
        watched.budget(step_ms=-1)
