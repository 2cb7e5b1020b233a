"""A run in a few numbers and sentences, for scripts and agents: an answer of bounded length."""

import html
import json
from pathlib import Path
from typing import Any

from ..analysis.loop_times import loop_sentences
from ..analysis.statistics import summaries
from ..record import RunRecord
from ..text import inert_line
from .configurations import step_results
from .quantities import StepResult
from .section import Table
from .sections.steps import results_table, step_answer, step_findings

MOST_CHARACTERS = 5_000
"""Longest answer as JSON, which is below 2,000 tokens: JSON has 2.5 characters a token at
least.
"""
LONGEST = 300
"""Longest text of an answer."""
QUANTITIES = (
    "tokens_per_s",
    "mfu",
    "peak_allocated_gib",
    "tensor_share",
    "sm_share",
    "dram_share",
    "nvlink_share",
    "pcie_share",
)


def sentences_of(record: RunRecord, result: StepResult) -> list[str]:
    """What the record says of its steps, the most important first."""
    return [*step_answer(result, record), *loop_sentences(record), *step_findings([result])]


def answer_of(record: RunRecord, /, **paths: Path | None) -> dict[str, Any]:
    """The answer, all of which JSON knows; `paths` are the files that have more.

    What is not known is left out, and so are the last warnings and sentences if it is too long.
    """
    (result,) = step_results([record])
    statistics = {}
    for name, times in summaries(record.times_s).items():
        statistics[name] = {key: _short(value) for key, value in times.items()}
    numbers = {key: _short(result[key]) for key in QUANTITIES if result[key] is not None}
    sentences = [inert_line(text, LONGEST) for text in sentences_of(record, result)]
    warnings = [
        {"code": str(warning.code), "message": inert_line(warning.message, LONGEST)}
        for warning in record.warnings
    ]
    answer = {
        "name": inert_line(record.subject.label, LONGEST),
        "status": str(record.status),
        "device": record.device_name,
        "measured_steps": record.subject.measured_steps,
        "findings": sentences,
        "statistics": statistics,
        **numbers,
        "warnings": warnings,
        **{name: str(path) for name, path in paths.items() if path is not None},
    }
    while len(json.dumps(answer)) > MOST_CHARACTERS and (warnings or sentences):
        (warnings or sentences).pop()
    return answer


def table_html(record: RunRecord) -> str:
    """The sentences and the table of a run, for a notebook."""
    results = step_results([record])
    texts = [f"<p>{html.escape(text)}</p>" for text in sentences_of(record, results[0])]
    return "".join([*texts, _html(results_table(results, has_csv=False))])


def _html(table: Table) -> str:
    heads = "".join(f"<th>{html.escape(heading.label)}</th>" for heading in table.headings)
    rows = []
    for row in table.rows:
        cells = "".join(f"<td>{html.escape(inert_line(cell))}</td>" for cell in row)
        rows.append(f"<tr>{cells}</tr>")
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _short(value: float | None) -> float | None:
    """To five significant digits."""
    return None if value is None else float(f"{value:.5g}")
