"""Makes the pages of docs/gallery again, and their picture: `make gallery`.

Each page is what `cs336 report` writes of published results, or of a trace, as it is.
"""

import os
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from cs336 import cli
from tests.committed import DATA, ROOT

GALLERY = ROOT / "docs" / "gallery"
PICTURE = ROOT / "docs" / "pictures" / "page.png"
PAGES = {
    "grid": "e2e_benchmark/train",
    "profile": "nsys_profiles/train",
    "memory": "memory_profiles/h200",
    "two-gpus": "parallel/kineto_profiles/xl",
}
"""The results directories below data/published, by the names of their pages."""
STRANGER = ROOT / "tests" / "analysis" / "kernels" / "two_gpus_sizes"
"""Traces of a loop that knows nothing of this program."""
CEILINGS = "ceilings"
WIDTH, HEIGHT = 1280, 640


def make_page(name: str, results: str) -> None:
    """Write the page of published results as their sweep would have, beside ceilings."""
    directory = Path("data", results)
    shutil.copytree(DATA / results, directory)
    report(directory)
    shutil.copy(directory / "index.html", GALLERY / f"{name}.html")


def make_page_of_stranger() -> None:
    """Write the page of the traces."""
    traces = Path("ddp_of_pytorch")
    shutil.copytree(STRANGER, traces)
    report(traces)
    (page,) = Path("data", "files").glob("*/index.html")
    shutil.copy(page, GALLERY / "stranger.html")


def report(path: Path) -> None:
    """Run the command; raise RuntimeError where it fails."""
    if cli.main(["report", str(path)]):
        raise RuntimeError(f"cs336 report {path} failed")


def take_picture() -> None:
    """Take a picture of the top of a page, by Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.goto((GALLERY / "profile.html").as_uri())
        page.screenshot(path=PICTURE)
        browser.close()


def main() -> None:
    """Make everything in a directory of its own, whose paths no page has."""
    with TemporaryDirectory() as directory:
        os.chdir(directory)
        shutil.copytree(DATA / CEILINGS, Path("data", CEILINGS))
        for name, results in PAGES.items():
            make_page(name, results)
        make_page_of_stranger()
        os.chdir(ROOT)
    if shutil.which("chromium") is None:
        sys.exit(f"no chromium here, so {PICTURE.relative_to(ROOT)} is the earlier one")
    take_picture()


if __name__ == "__main__":
    main()
