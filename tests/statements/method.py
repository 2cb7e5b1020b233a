"""What README says of intervals, taken from the code that computes them."""

import inspect
from collections.abc import Sequence

from cs336_systems.analysis.statistics import FEWEST, mean_interval
from tests.statements.documents import Value, claim
from tests.statements.results import README


@claim(README, r"With `--repeats`, (\w+) or more")
def fewest_processes_for_an_interval() -> Sequence[Value]:
    return (FEWEST,)


@claim(README, r"a (\d+) % confidence interval over fresh processes")
def confidence_over_processes() -> Sequence[Value]:
    return (100 * inspect.signature(mean_interval).parameters["confidence"].default,)
