"""Writes the page of a ladder, of a study, or of all results below a directory."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cs336_systems.report.page.collection import Collection
    from cs336_systems.report.status_line import StatusLine

PAGE_FILE = "index.html"
"""The page for a browser, beside the tables."""


def write_collection_page(collection: "Collection", status: "StatusLine") -> Path:
    """Write the page of the collection into its root, with progress messages; return its path."""
    from cs336_systems.report.page.chapters import collection_page
    from cs336_systems.report.page.write import write_page

    def on_progress(directory: Path, done: int, total: int) -> None:
        status(f"making the page: {directory}", done, total)

    page = collection.root / PAGE_FILE
    made = collection_page(collection, on_progress)
    status("writing the page")
    write_page(made, page)
    return page
