"""Says whether a tag may be released: `python .ci/check_release.py v0.1.0`.

The tag must name the version that the package has, and the newest section of the changelog must be
of that version, with its date.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def problem_of(tag: str, package: str, changelog: str) -> str | None:
    """Why the tag is no release, by the text of the package's `__init__.py` and of the changelog;
    None if it is one.
    """
    version = re.search(r'^__version__ = "(.+)"$', package, re.MULTILINE)
    if version is None:
        return 'cs336_systems/__init__.py: needed a line __version__ = "...", which is not there'
    if tag != f"v{version[1]}":
        return f"the tag is {tag}, and the version v{version[1]}: correct one of them"
    section = re.search(r"^## (.+)$", changelog, re.MULTILINE)
    heading = None if section is None else section[1]
    if heading is None or not re.fullmatch(
        rf"{re.escape(version[1])} \(\d{{4}}-\d\d-\d\d\)", heading
    ):
        return (
            f"CHANGELOG.md: needed a first section of {version[1]} with its date, as in "
            f"`## {version[1]} (2026-01-31)`, got {heading!r}"
        )
    return None


def main(tag: str) -> int:
    """Check the tag against this checkout; exit status 1 if it is no release."""
    package = (ROOT / "cs336_systems" / "__init__.py").read_text(encoding="utf-8")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    problem = problem_of(tag, package, changelog)
    if problem is not None:
        print(f"error: {problem}", file=sys.stderr)
    return int(problem is not None)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2] or [""]))
