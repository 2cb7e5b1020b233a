"""Joins the records of results directories for data/published: `python -m tests.publish DIR...`,
after they were copied there.

Each file of `runs/` becomes a line of `runs.jsonl`, the same JSON without line breaks, and is
removed. Lines that are there already stay; a file takes the place of the line of the same run.
"""

import sys
from pathlib import Path

import msgspec

from cs336.files import write_atomically
from cs336.record import RUNS, RunRecord, published_runs, read_record


def publish(directory: Path) -> None:
    """Move the records of the directory from their files into lines, in the order of their keys."""
    runs = directory / RUNS
    joined = published_runs(runs)
    lines: dict[str, bytes] = {}
    if joined.is_file():
        for line in joined.read_bytes().splitlines():
            lines[msgspec.json.decode(line, type=RunRecord).key] = line
    paths = sorted(runs.glob("*.json"))
    for path in paths:
        lines[read_record(path).key] = msgspec.json.format(path.read_bytes(), indent=-1)
    write_atomically(joined, b"".join(lines[key] + b"\n" for key in sorted(lines)))
    for path in paths:
        path.unlink()
    if paths:
        runs.rmdir()


if __name__ == "__main__":
    for name in sys.argv[1:]:
        publish(Path(name))
