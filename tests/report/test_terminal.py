"""Tables of every command as terminals of all widths and pipes show them."""

import fcntl
import functools
import os
import random
import re
import struct
import sys
import termios
from collections import Counter
from pathlib import Path

import pytest
from rich.cells import cell_len

from cs336.commands.account import AccountArguments
from cs336.config import Precision
from cs336.costs.hardware import find_device
from cs336.report.columns import Column
from cs336.report.compared import Sides, compare_sides
from cs336.report.configurations import step_results
from cs336.report.section import FINDING, Table
from cs336.report.sections.account import Account, account_section
from cs336.report.sections.ceilings import ceilings_sections
from cs336.report.sections.kernels.entry import Explained
from cs336.report.sections.kernels.files import tables_of, tables_of_one
from cs336.report.sections.ladder import ladder_results, ladder_section
from cs336.report.sections.memory.entry import MemoryEntry
from cs336.report.sections.memory.tables import memory_tables
from cs336.report.sections.memory.tables import tables_of_one as snapshot_tables
from cs336.report.sections.operators import attention_section, fusion_section
from cs336.report.sections.steps import results_table, warmup_table
from cs336.report.sections.study import accumulation_section
from cs336.report.terminal import JOINT, print_sentences, print_table
from cs336.studies.operators import Implementation, Version
from cs336.studies.precision import accumulation_study
from cs336.text import inert_line
from tests.report.ceilings import all_tables, make_whole
from tests.report.ladders import make_entry, make_ladder, make_records
from tests.report.making import CODES, H200, make_config, make_failure, make_record
from tests.report.sections.kernels.profiles import make_profile
from tests.report.sections.memory.profiles import make_memory
from tests.report.studies import make_cell, make_fusion, make_result, make_row, make_study

WIDTHS = (40, 60, 80, 100, 140, 200)
FILES = Path("data/x")
KINDS = (
    "results",
    "warm-up",
    "ladder",
    "ladder's others",
    "ceilings",
    "products",
    "bandwidth",
    "launches",
    "attention",
    "attention's memory",
    "fusion",
    "kernels",
    "kernels of a sweep",
    "memory",
    "memory of a sweep",
    "account",
    "compare",
    "precision",
)


@functools.cache
def kinds():
    """Tables of every command, with the columns that each must show: what tells its rows apart,
    and their times.
    """
    sizes = ("small", "medium", "2.7B")
    precisions = (Precision.FP32, Precision.BF16)
    configs = [
        make_config(size, length, precision=p)
        for size in sizes
        for length in (128, 512)
        for p in precisions
    ]
    records = [make_record(config, (0.9, 1.0012, 1.13), codes=CODES) for config in configs]
    records.append(make_failure(make_config("xl")))
    warmups = [make_record(make_config(warmup_steps=n), (0.9, 1.0012, 1.13)) for n in (0, 1, 5)]
    ladder = make_ladder("tiny")
    rungs = ladder_results(ladder, make_records(ladder), [make_entry(ladder[1])])
    cells = [make_cell(name, 64, length) for name in Implementation for length in (512, 16384)]
    attention = make_study(
        *(make_result(cell) for cell in cells), implementations=tuple(Implementation)
    )
    profiled = [make_record(make_config(size), (0.1, 0.11)) for size in sizes]
    entries = [Explained(profile=make_profile(), plain=r, profiled=r) for r in profiled]
    memory = [
        MemoryEntry(subject=r.config, profile=make_memory(), device_name=r.device_name)
        for r in profiled
    ]
    fusion = make_fusion(*(make_row(version=version) for version in Version))
    step = AccountArguments(size="small", context_length=512).config()
    compared = compare_sides(Sides(a="a", b="b"), (records[:6], records[:6]))
    account = Account(config=step, device=find_device(H200), memory_bytes=40e9)
    found = {
        "results": (
            [results_table(step_results(records))],
            ("size", "context", "precision", "step", "status"),
        ),
        "warm-up": (
            [warmup_table(step_results(warmups))],
            ("size", "context", "precision", "warm-up", "step"),
        ),
        "ladder": (ladder_section(rungs).tables[:1], ("rung", "step", "gate")),
        "ladder's others": (ladder_section(rungs).tables[1:], ("rung",)),
        "ceilings": (
            all_tables(ceilings_sections(make_whole()))[:1],
            ("ceiling", "measured", "unit"),
        ),
        "products": (
            all_tables(ceilings_sections(make_whole()))[1:4],
            ("product", "rows x inner x columns", "time"),
        ),
        "bandwidth": (all_tables(ceilings_sections(make_whole()))[4:5], ("pass", "moved", "time")),
        "launches": (
            all_tables(ceilings_sections(make_whole()))[5:6],
            ("a kernel on one element", "time"),
        ),
        "attention": (
            attention_section(attention).tables[:2],
            ("d_head", "context", *Implementation),
        ),
        "attention's memory": (
            attention_section(attention).tables[2:],
            ("d_head", "context", "naive"),
        ),
        "fusion": (fusion_section(fusion).tables, ("op", "version", "time")),
        "kernels": (
            tables_of_one(Explained(profile=make_profile()), 10),
            ("phase", "kernel", "total", "finding"),
        ),
        "kernels of a sweep": (tables_of(entries), ("size", "phase", "step")),
        "memory": (snapshot_tables(make_memory(), 10), ("moment", "finding", "part")),
        "memory of a sweep": (memory_tables(memory), ("size", "peak")),
        "account": (account_section(account, 10).tables, ("part", "step")),
        "compare": (compared.section.tables, ("size", "context", "B is")),
        "precision": (
            accumulation_section(accumulation_study()).tables,
            ("sum", "addend", "result"),
        ),
    }
    assert tuple(found) == KINDS
    assert all(tables and all(table.rows for table in tables) for tables, _ in found.values())
    return found


def words(texts):
    return Counter(word for text in texts for word in text.split())


def needed(table, names):
    """Every row's cells below the headings of these names."""
    columns = [index for index, heading in enumerate(table.headings) if heading.name in names]
    return [row[column] for row in table.rows for column in columns]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_the_width_every_row_has_its_name_and_its_time(kind, width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    tables, names = kinds()[kind]
    for table in tables:
        print_table(table, FILES)
        out = capsys.readouterr().out
        assert max(map(cell_len, out.splitlines())) <= width
        broken = {word for word in words(needed(table, names)) if len(word) > 24}
        missing = words(needed(table, names)) - words([out])
        assert not set(missing) - broken
        shown, _, left_out = out.partition("Not shown at this width: ")
        for heading in table.headings:
            is_named = inert_line(heading.label) in " ".join(left_out.split())
            assert is_named or not words([heading.name]) - words([shown.replace(":", " ")])
        assert not left_out or str(FILES) in left_out.replace("\n", "")
        assert not words(table.notes) - words([shown]), "notes wrap between words, and none is lost"


UNIT_OF = {"ms": "ms", "us": "µs", "mib": "MiB", "gib": "GiB"}
"""The unit that a column's heading names, by the ending of its key."""


@pytest.mark.parametrize("kind", KINDS)
def test_every_column_of_times_or_sizes_names_its_unit(kind):
    for table in kinds()[kind][0]:
        for heading in table.headings:
            unit = UNIT_OF.get(heading.key.rpartition("_")[2])
            assert unit is None or unit in heading.unit, heading


@pytest.mark.parametrize("kind", KINDS)
def test_a_pipe_gets_all_columns_whole_and_one_line_for_each_row(kind, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    for table in kinds()[kind][0]:
        print_table(table, FILES)
        title, *lines = capsys.readouterr().out.splitlines()
        assert title == inert_line(table.title)
        if table.headings == FINDING:
            assert lines == [*(f"{number}. {text}" for number, text in table.rows), *table.notes]
            continue
        assert all(heading.key for heading in table.headings)
        rule = next(index for index, line in enumerate(lines) if line.startswith("───"))
        body, notes = lines[rule + 1 :][: len(table.rows)], lines[rule + 1 + len(table.rows) :]
        assert notes == [inert_line(note) for note in table.notes]
        for row, line in zip(table.rows, body, strict=True):
            assert line.split() == [word for cell in row for word in inert_line(cell).split()]


def on_a_terminal(columns, print_it, monkeypatch):
    """What `print_it` writes to a pseudo-terminal of so many columns."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setattr(sys, "__stdout__", terminal)
        print_it()
        terminal.flush()
        text = os.read(ours, 1 << 16).decode()
        monkeypatch.undo()
    os.close(ours)
    return re.sub(r"\x1b\[[0-9;]*m|\r", "", text)


@pytest.mark.parametrize("columns", [47, 61])
def test_the_width_is_the_terminals_unless_columns_says_another(columns, capsys, monkeypatch):
    """The longest line of wrapped words is within a word of the width."""
    note = "word " * 100
    table = Table(title="t", headings=(Column("a"),), rows=(("1",),), notes=(note.strip(),))
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    text = on_a_terminal(columns, lambda: print_table(table), monkeypatch)
    assert columns - 5 <= max(map(len, map(str.rstrip, text.splitlines()))) <= columns
    monkeypatch.setenv("COLUMNS", str(columns))
    print_table(table)
    text = capsys.readouterr().out
    assert columns - 5 <= max(map(len, map(str.rstrip, text.splitlines()))) <= columns


UNITS = ("%", "ms", "µs", "GiB", "GB/s", "TFLOP/s", "tokens/s", "days")


def drawn_quantity(rng):
    value = f"{10 ** rng.uniform(-3, 5):,.{rng.choice([0, 2])}f}"
    return f"{value}{rng.choice(['', ' ± 4', ' ± 0.07 ?'])} {rng.choice(UNITS)}"


@pytest.mark.parametrize("seed", range(4))
def test_no_line_ends_within_a_quantity(seed, capsys, monkeypatch):
    rng = random.Random(seed)
    quantities = [drawn_quantity(rng) for _ in range(20)]
    text = " ".join(f"{'word ' * rng.randrange(4)}{quantity}, of 3" for quantity in quantities)
    headings = (Column("a", numeric=False), Column("b"))
    table = Table(title=text, headings=headings, rows=((text, "1.5 ms"),), notes=(text,))
    for width in (30, 50, 80):
        monkeypatch.setenv("COLUMNS", str(width))
        print_sentences([text])
        print_table(table)
        out = capsys.readouterr().out
        for quantity, times in Counter(quantities).items():
            assert out.count(quantity) >= 4 * times, quantity
        lines = out.splitlines()
        assert max(map(cell_len, lines)) <= width
        assert JOINT not in out


def test_columns_go_in_the_declared_order(capsys, monkeypatch):
    orders = (0, 2, 1, 3)
    headings = tuple(Column(f"h{order}", drop_order=order) for order in orders)
    table = Table(title="t", headings=headings, rows=(tuple("1" * 10 for _ in orders),))
    for width, left_out in (
        (46, []),
        (40, ["h3."]),
        (30, ["h2,", "h3."]),
        (20, ["h2,", "h1,", "h3."]),
    ):
        monkeypatch.setenv("COLUMNS", str(width))
        print_table(table)
        assert capsys.readouterr().out.partition("width: ")[2].split() == left_out
