"""How the results of a study become files."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from matplotlib.figure import Figure

from cs336_systems.files import encode_json
from cs336_systems.report.plots.drawing import to_png
from cs336_systems.report.section import Section, texts_of, write_files


def write_study(
    name: str, study: object, sections: Iterable[Section], pictures: Mapping[str, Figure | None], directory: Path
) -> list[Path]:
    """Write the record of the study, each section and plots/ into the directory, which is made; return the paths.

    `name` is that of the record's file. A picture that is None shows nothing: an earlier one of its name is removed.
    """
    files: dict[str, str | bytes] = {name: encode_json(study)}
    for section in sections:
        files |= texts_of(section)
    files |= {f"plots/{title}.png": b"" if figure is None else to_png(figure) for title, figure in pictures.items()}
    return write_files(files, directory)
