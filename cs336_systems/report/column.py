"""A column of a table: its heading, its explanation, and how its cells are written.

A `Quantity` is a column that also says how its value is computed. It is declared as a method:

    class StepResult:
        @quantity("tokens/s", place=44)
        def tokens_per_s(self) -> float | None:
            \"\"\"Tokens of a step over its mean time.\"\"\"

The name of the method is the key of the column and the attribute that holds the value, its
docstring is the explanation. `StepResult.tokens_per_s` is the column itself.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, Generic, Literal, Self, TypeAlias, TypeVar, overload

from .words import DOUBT, count, mean_and_std, rounded, significant

T = TypeVar("T")

Row: TypeAlias = dict[str, Any]
"""The values of one row by key; None is unknown."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table. Its cells show the value that each row has under `key`."""

    name: str
    unit: str = ""
    about: str = ""
    """What the values are, in a sentence."""
    drop_order: int = 0
    """If above 0, a terminal that is too narrow for the table leaves the column out, the highest
    number first.
    """
    _: KW_ONLY
    numeric: bool = True
    """Numbers are aligned to the right, texts to the left."""
    wraps: bool = True
    """Whether a narrow terminal may break a text between its words, before it leaves out columns.
    Numbers are never broken.
    """
    text: Callable[[Any], str] | None = None
    """Writes the cell from the whole row, for a cell that shows more than the value under `key`."""
    key: str = ""
    """Key of the value in a row, and name of the column in CSV files."""
    scale: float = 1
    """Factor that converts the value to `unit`."""
    write: Callable[[Any], str] = significant
    """How the scaled value is written."""
    std: str = ""
    """Key of the standard deviation, which the cell shows behind the value; empty for a cell
    without one.
    """
    doubt: str = ""
    """Key of a bool: whether the value is in doubt. If so, the cell ends with a mark."""
    derived: bool = False
    """The value was computed from times: its standard deviation is shown only if it is in doubt."""
    instead: str = ""
    """Key of a text that the cell shows if the value is unknown, such as how the run failed."""

    @property
    def label(self) -> str:
        """The heading on one line: name and unit."""
        return f"{self.name} ({self.unit})" if self.unit else self.name

    def cell(self, row: Mapping[str, Any]) -> str:
        """The text of this column's cell in a row; for an unknown value what `instead` names, or
        nothing.

        A standard deviation is added to a derived value only if the value is in doubt.
        """
        if self.text is not None:
            return self.text(row)
        value = row[self.key]
        if value is None:
            return str(row[self.instead] or "") if self.instead else ""
        std = row[self.std] if self.std else None
        is_doubted = bool(self.doubt and row.get(self.doubt))
        if std is not None and value and (is_doubted or not self.derived):
            text = mean_and_std(value * self.scale, std * self.scale)
        else:
            text = self.written(value)
        return f"{text} {DOUBT}" if is_doubted else text

    def written(self, value: Any) -> str:  # noqa: ANN401 (the value of any column)
        """The value as text, in the column's unit, without standard deviation or mark of doubt."""
        return self.write(value if self.scale == 1 else value * self.scale)


Written: TypeAlias = Literal["always", "shared", "watched", "known", "never"]
"""When a CSV file has the column of a quantity; `shared` means if some run has several ranks,
`known` if some run has a value.
"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Quantity(Column, Generic[T]):
    """A column whose value is computed from an object, once, and kept there."""

    compute: Callable[[Any], T]
    in_csv: Written = "always"
    place: int = 0
    """Place in the table of all quantities, the smallest first; 0 for one that is not in it."""
    of_one_run: bool = False
    """Only the table of a single run, which is printed, shows it."""

    def __set_name__(self, owner: type, name: str) -> None:
        """Take the method's name as the key of the column."""
        object.__setattr__(self, "key", name)

    @overload
    def __get__(self, row: None, owner: type) -> Self: ...

    @overload
    def __get__(self, row: object, owner: type) -> T: ...

    def __get__(self, row: object | None, owner: type) -> Self | T:
        """The quantity itself on the class; on a row its value, computed once and kept in the
        row.
        """
        if row is None:
            return self
        # the entry in the row's dict hides this method from now on, as with cached_property
        value = vars(row)[self.key] = self.compute(row)
        return value


def quantity(
    name: str = "",
    unit: str = "",
    **others: Any,  # noqa: ANN401 (further fields of Quantity)
) -> Callable[[Callable[[Any], T]], Quantity[T]]:
    """Make a method the quantity of this heading and unit, with the docstring as explanation."""

    def declare(compute: Callable[[Any], T]) -> Quantity[T]:
        """Make a `Quantity` of a method that computes the value; its docstring is the column's
        explanation.
        """
        about = inspect.getdoc(compute) or ""
        return Quantity(name, unit, about, compute=compute, **others)

    return declare


two_digits, three_digits, six_digits = (partial(significant, digits=digits) for digits in (2, 3, 6))
signed, four_decimals = "{:+z.1f}".format, "{:+z.4f}".format
"""Signed, to one decimal and to four."""


def short(value: float) -> str:
    """A value as text with three significant digits; `0` for zero."""
    return significant(value, 3) if value else "0"


def text_column(
    name: str,
    about: str,
    drop_order: int = 0,
    write: Callable[[Any], str] = str,
    *,
    wraps: bool = True,
) -> Column:
    """A column of texts."""
    return Column(name, "", about, drop_order, numeric=False, wraps=wraps, write=write)


def rounded_ms(name: str, about: str, drop_order: int = 0, doubt: str = "") -> Column:
    """A column of times in milliseconds, to four digits."""
    return Column(name, "ms", about, drop_order, write=rounded, doubt=doubt)


def count_column(name: str, about: str, drop_order: int = 0) -> Column:
    """A column of counts, or of means of counts."""
    return Column(name, "", about, drop_order, write=count)
