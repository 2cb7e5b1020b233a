"""Makes the pages of docs/gallery and the pictures of docs/pictures again: `make gallery`.

Each page and picture is what `cs336 report` writes of published results, or of a trace, as it is.
"""

import os
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from cs336 import cli
from tests.committed import DATA, ROOT

GALLERY = ROOT / "docs" / "gallery"
PICTURES = ROOT / "docs" / "pictures"
PAGES = {
    "grid": "e2e_benchmark/train",
    "profile": "nsys_profiles/train",
    "memory": "memory_profiles/h200",
    "two-gpus": "parallel/kineto_profiles/xl",
}
"""The results directories below data/published, by the names of their pages."""
PLOTS = {
    "classes": "nsys_profiles/train/plots/configurations.png",
    "communication": "parallel/kineto_profiles/xl/plots/communication.png",
    "ladder": "ladder/gpt2/plots/ladder.png",
    "memory_timeline": (
        "memory_profiles/h200/plots/xl_ctx512_b4_train_fp32_48beef9476_r0_timeline.png"
    ),
    "step_time_train": "e2e_benchmark/train/plots/step_time.png",
    "step_timeline": "nsys_profiles/train/plots/small_ctx_128_timeline.png",
}
"""The pictures of results, by the names of those of the documents."""
STRANGER = ROOT / "tests" / "analysis" / "kernels" / "two_gpus_sizes"
"""Traces of a loop that knows nothing of this program."""
CEILINGS = "ceilings"
WIDTH, HEIGHT = 1280, 640


def make_page(name: str, results: str) -> None:
    """Write the page of published results as their sweep would have, beside ceilings."""
    shutil.copy(reported(results) / "index.html", GALLERY / f"{name}.html")


def reported(results: str) -> Path:
    """A copy of published results with what their command writes of them."""
    directory = Path("data", results)
    if not directory.exists():
        shutil.copytree(DATA / results, directory)
        report(directory)
    return directory


def copy_plots() -> None:
    """Copy the pictures of results that documents show."""
    for name, plot in PLOTS.items():
        results, _, file = plot.partition("/plots/")
        shutil.copy(reported(results) / "plots" / file, PICTURES / f"{name}.png")


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
        page.screenshot(path=PICTURES / "page.png")
        browser.close()


def main() -> None:
    """Make everything in a directory of its own, whose paths no page has."""
    with TemporaryDirectory() as directory:
        os.chdir(directory)
        shutil.copytree(DATA / CEILINGS, Path("data", CEILINGS))
        for name, results in PAGES.items():
            make_page(name, results)
        copy_plots()
        make_page_of_stranger()
        os.chdir(ROOT)
    if shutil.which("chromium") is None:
        sys.exit("no chromium here, so docs/pictures/page.png is the earlier one")
    take_picture()


if __name__ == "__main__":
    main()
