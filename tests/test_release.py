"""What a tag must be to be released: .ci/check_release.py."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

PATH = Path(__file__).parents[1] / ".ci" / "check_release.py"


def problem_of(tag: str, version: str, heading: str) -> str | None:
    spec = spec_from_file_location("check_release", PATH)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    older = "## 0.0.9 (2025-12-31)\n"
    problem = module.problem_of(
        tag,
        f'import os\n\n__version__ = "{version}"\n',
        f"# Changelog\n\n{heading}\n- a\n\n{older}",
    )
    assert problem is None or "\n" not in problem
    return problem


def test_a_tag_of_the_version_with_a_dated_section_is_released() -> None:
    assert problem_of("v1.2.0", "1.2.0", "## 1.2.0 (2026-12-01)") is None


@pytest.mark.parametrize(
    ("tag", "version", "heading"),
    [
        ("v1.2.1", "1.2.0", "## 1.2.0 (2026-12-01)"),
        ("1.2.0", "1.2.0", "## 1.2.0 (2026-12-01)"),
        ("", "1.2.0", "## 1.2.0 (2026-12-01)"),
        ("v1.2.0", "1.2.0", "## 1.2.0 (not yet published)"),
        ("v1.2.0", "1.2.0", "## 1x2.0 (2026-12-01)"),
        ("v1.2.0", "1.2.0", "nothing new"),
        ("v0.0.9", "1.2.0", "nothing new"),
    ],
)
def test_another_version_or_an_undated_section_is_not(tag: str, version: str, heading: str) -> None:
    assert problem_of(tag, version, heading) is not None
