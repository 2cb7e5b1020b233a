"""The picture of a sweep's page that README shows: `python -m tests.report.page.picture` writes docs/pictures/page.png.

It leaves out what would make it long: all rows but those of context 512, and the notes below tables. The cells that it
shows are in the file as text too, by which a test finds a picture that is out of date.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo
from playwright.sync_api import sync_playwright

from cs336_systems.record import load_records
from cs336_systems.report.page.chapters import Collection, collection_page
from cs336_systems.report.page.write import write_page
from cs336_systems.report.results import Results
from cs336_systems.studies.ceilings_files import ceilings_beside, load_ceilings
from tests.report.page.grid import GRID

ROOT = GRID.parents[3]
PICTURE = ROOT / "docs" / "pictures" / "page.png"
WIDTH = 1280
COLOURS = 64
CELLS = "cells"
LEFT_OUT = "main .source, .note"


def main() -> None:
    """Open the page of the committed grid, and take the picture from the title to the end of the first figure."""
    results = Results.load(load_records(GRID / "runs")[0], GRID, load_ceilings(ceilings_beside(GRID)))
    page = collection_page(Collection(root=GRID, sweeps={Path(): results}))
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = Path(folder) / "index.html"
        write_page(page, path)
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=sandbox)
        tab = browser.new_page(viewport={"width": WIDTH, "height": 2000}, color_scheme="light")
        tab.goto(path.as_uri())
        tab.locator(LEFT_OUT).evaluate_all("(all) => { for (const own of all) own.remove(); }")
        tab.fill("#results input[type=search]", "512")
        figure = tab.locator("figure").first
        rows = [row.split("\t") for row in tab.locator("#results tbody tr:visible").all_inner_texts()]
        tab.locator("h1").click()  # takes the focus from the search
        box = figure.bounding_box()
        assert box is not None
        tab.screenshot(path=PICTURE, clip={"x": 0, "y": 0, "width": WIDTH, "height": box["y"] + box["height"] + 10})
        browser.close()
    shown = PngInfo()
    shown.add_text(CELLS, json.dumps(rows))
    Image.open(PICTURE).quantize(COLOURS).save(PICTURE, optimize=True, pnginfo=shown)


if __name__ == "__main__":
    main()
