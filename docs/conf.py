"""The site, `make docs`: Sphinx reads the documents where they are, and nothing is copied for it.

The source directory is the repository, so that a link means the same on the site, in an editor and
where the repository is hosted. MkDocs would want all documents in one folder, and the support of
its theme Material ends in May 2027.
"""

import dataclasses
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, get_type_hints

if TYPE_CHECKING:  # a test reads the navigation where Sphinx is not installed
    from sphinx.application import Sphinx

DOCS = Path(__file__).parent
GALLERY = "docs/gallery"
"""Pages that `cs336 report` wrote, which the site has as they are."""
HOME = '<!doctype html><title>cs336</title><meta http-equiv="refresh" content="0; url=README.html">'
CONTENTS = {
    "Begin": {
        "Start": "docs/START",
        "Reading the output": "docs/OUTPUT",
        "Gallery": "docs/GALLERY",
        "Questions": "docs/FAQ",
    },
    "Guides": {
        "Your model": "docs/MODEL",
        "Your loop": "docs/LOOP",
        "A file of another program": "docs/FILES",
        "Plan a training": "docs/PLAN",
        "Tests of a step's cost": "docs/TESTS",
        "Several GPUs": "docs/RANKS",
        "Several machines": "docs/CLUSTER",
        "The course": "docs/COURSE",
    },
    "Background": {
        "How it measures": "docs/METHOD",
        "Results": "docs/RESULTS",
        "The ledger of a fast step": "docs/LEDGER",
        "Published data": "data/published/README",
    },
    "Reference": {"Python": "docs/API", "Extend it": "CONTRIBUTING", "Changes": "CHANGELOG"},
}
"""The navigation: headings, and below each the documents by title. README is the first page."""

project = "cs336-systems"
root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "data/published/**.md"]
exclude_patterns = ["build", ".venv", "tests", "cs336_systems"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
# published tables have no title of their own, and documents link to them
suppress_warnings = ["myst.header", "toc.not_included"]
myst_heading_anchors = 3
default_role = "code"  # of docstrings
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True
html_theme = "furo"
html_title = project
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_show_copyright = False


def add_contents(_: "Sphinx", document: str, source: list[str]) -> None:
    """Append the navigation to README, from which Sphinx takes it."""
    if document == root_doc:
        for heading, documents in CONTENTS.items():
            lines = "\n".join(f"{title} </{name}>" for title, name in documents.items())
            source[0] += f"\n\n```{{toctree}}\n:hidden:\n:caption: {heading}\n\n{lines}\n```\n"


def add_gallery(app: "Sphinx", error: Exception | None) -> None:
    """Put the pages of the gallery beside the page that links to them, and README first."""
    if error is None:
        shutil.copytree(DOCS / "gallery", app.outdir / GALLERY, dirs_exist_ok=True)
        (app.outdir / "index.html").write_text(HOME)


def list_fields(_: "Sphinx", what: str, __: str, documented: object, *___: object) -> object:
    """Leave out the signature of a dataclass, as all of its fields are listed below it, with the
    types that a reader needs: `int`, and not the limits that a file is checked by.
    """
    if what != "class" or not dataclasses.is_dataclass(documented):
        return None
    documented.__annotations__ = get_type_hints(documented)
    return "", None


def setup(app: "Sphinx") -> None:
    """Connect what this file adds; Sphinx calls it."""
    app.connect("source-read", add_contents)
    app.connect("build-finished", add_gallery)
    app.connect("autodoc-process-signature", list_fields)
