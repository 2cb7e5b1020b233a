"""Names of kernels of public projects, as profilers write them, with their true classes.

A class is judged from the source of the kernel. Mangled names and bare functions stand for what
nsys and Kineto write of them. `other` is the class of a name that does not say what the kernel
does. A third of the names, drawn with a seed, was held back while the rules were written.
"""

import csv
from pathlib import Path

from cs336.analysis.kernels.classes import KernelClass

_ROWS = list(csv.DictReader(Path(__file__).with_suffix(".tsv").open(), delimiter="\t"))
ALL = {row["name"]: KernelClass(row["class"]) for row in _ROWS}
HELD_BACK = frozenset(row["name"] for row in _ROWS if row["used"] == "held back")
