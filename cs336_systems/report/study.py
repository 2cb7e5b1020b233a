"""How the results of a study become files."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from matplotlib.figure import Figure

from cs336_systems.files import encode_json
from cs336_systems.report.drawing import to_png
from cs336_systems.report.listing import Listing, texts_of, write_files


def write_study(
    name: str, study: object, listings: Iterable[Listing], pictures: Mapping[str, Figure | None], directory: Path
) -> list[Path]:
    """Write the record of the study, each listing and plots/ into the directory, which is made; return the paths.

    `name` is that of the record's file. A picture that is None shows nothing: an earlier one of its name is removed.
    """
    files: dict[str, str | bytes] = {name: encode_json(study)}
    for listing in listings:
        files |= texts_of(listing)
    files |= {f"plots/{title}.png": b"" if figure is None else to_png(figure) for title, figure in pictures.items()}
    return write_files(files, directory)
