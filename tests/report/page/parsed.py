"""What a browser would find in a page, without running its script."""

import re
from html.parser import HTMLParser


def as_written(page):
    """The page as if lines could end at any space and hyphen."""
    return re.sub(r'<span class="flag">(.*?)</span>', r"\1", page).replace("\xa0", " ")


class Parsed(HTMLParser):
    """The tables of a page by identifier, with headings and cells."""

    def __init__(self, page):
        super().__init__()
        self.headings, self.cells = {}, {}
        self._into, self._table, self._row, self._column = None, "", -1, 0
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        if tag == "div" and "table" in (found.get("class") or "").split():
            self._table, self._row = found["id"], -2  # the row of headings comes first
        elif tag == "tr":
            self._row, self._column = self._row + 1, -1
        elif tag == "th":
            self._into = [""]
            self.headings.setdefault(self._table, []).append(self._into)
        elif tag == "td" and self._table:
            self._column += 1
            self._into = self.cells[f"{self._table}.{self._row}.{self._column}"] = [
                "",
                found.get("data-order"),
            ]

    def handle_endtag(self, tag):
        if tag in ("th", "td", "tr"):  # a cell may have no end of its own
            self._into = None

    def handle_data(self, data):
        if self._into is not None:
            self._into[0] += data

    def rows(self, table):
        """The cells of each row of a table, as texts with the values that they are sorted by, by
        their headings.
        """
        headings = [" ".join(heading.split()) for (heading,) in self.headings[table]]
        own = {
            name: cell
            for name, cell in self.cells.items()
            if name.rpartition(".")[0].rpartition(".")[0] == table
        }
        numbers = range(len(own) // len(headings))
        assert len(own) == len(numbers) * len(headings), "no cell is without a heading"
        return [
            {heading: own[f"{table}.{number}.{place}"] for place, heading in enumerate(headings)}
            for number in numbers
        ]
