"""A reader follows the numbers of the findings to their cells, and opens a run, in Chromium."""

from dataclasses import replace

import pytest

from cs336_systems.record import Failure, RunWarning, Status, WarningCode
from cs336_systems.report.page.contents import sweep_page
from cs336_systems.report.page.write import write_page
from cs336_systems.report.results import Results
from tests.report.making import make_config, make_failure, make_record
from tests.report.page.pages import ATTACK, HOSTILE_TEXTS
from tests.report.page.test_browser import chromium, until  # noqa: F401 (a fixture)

pytestmark = pytest.mark.browser


@pytest.fixture(params=[1280, 400])
def tab(request, chromium, tmp_path):  # noqa: F811
    """The page of a sweep with hostile names, messages and a traceback."""
    warnings = [RunWarning(code=code, message=text) for code in (WarningCode.UNSTABLE, WarningCode.THROTTLED)
                for text in HOSTILE_TEXTS if text.isascii()]  # fmt: skip
    records = [
        replace(make_record(make_config("small"), (0.02, 0.03)), warmup_times_s=(0.5, 0.02), warnings=tuple(warnings)),
        make_record(make_config(ATTACK), (0.05, 0.05)),
        replace(make_failure(make_config("medium"), Status.OOM), failure=Failure(message=ATTACK, traceback=ATTACK)),
    ]
    path, found = tmp_path / "index.html", []
    write_page(sweep_page(Results(records=records), tmp_path), path)
    context = chromium.new_context(viewport={"width": request.param, "height": 900})
    context.set_default_timeout(60_000)
    opened = context.new_page()
    opened.on("console", lambda message: found.append(message.text))
    opened.on("pageerror", lambda error: found.append(str(error)))
    opened.goto(path.as_uri())
    yield opened
    assert not opened.evaluate("window.hacked")
    assert opened.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing is wider than the page"
    context.close()
    assert found == []


def test_a_number_of_a_finding_leads_to_its_cell_and_all_warnings_open(tab):
    tab.click("#findings >> text=50.00 ms")
    until(tab, "document.querySelector('td.marked') !== null")
    assert tab.inner_text("td.marked").startswith("50.00")
    closed = tab.locator("#findings details p").first
    assert not closed.is_visible()
    tab.click("#findings details summary")
    assert closed.is_visible()
    assert tab.locator("#findings details p").count() == 2 * len([text for text in HOSTILE_TEXTS if text.isascii()])


def test_a_run_opens_with_its_facts_its_steps_and_its_traceback(tab):
    tab.locator("#run-0 > summary").click()
    tab.locator("#run-0 .drawing").scroll_into_view_if_needed()
    tab.wait_for_selector("#run-0 .main-svg")
    facts = dict(
        zip(tab.locator("#run-0 dt").all_inner_texts(), tab.locator("#run-0 dd").all_inner_texts(), strict=True)
    )
    assert facts["Step"].startswith("25 ± 7 ms")
    assert facts["Warm-up"] == "2 steps, the first 500.0 ms, the last 20.00 ms"
    shown = tab.evaluate("document.querySelector('#run-0 .drawing').data.map((line) => [line.name, [...line.y]])")
    assert dict(shown)["warm-up"] == [500, 20]
    assert dict(shown)["step"] == [20, 30]
    failed = tab.locator("details.run.failed")
    assert failed.count() == 1
    failed.locator("summary").click()
    until(tab, "document.querySelector('details.run.failed pre') !== null")
    assert ATTACK in failed.inner_text()
