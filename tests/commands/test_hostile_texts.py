"""No text of any file reaches a terminal, a table or a picture with its control characters, or
whole if it is long.

JSON is for programs. Every text that a file of any kind may hold is the worst there is, and so is
the file's own name; then the commands that read such files run, and all that they print, write and
draw is looked through.
"""

import contextlib
import csv
import pickle
import unicodedata
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from cs336 import cli
from cs336.analysis.kernels.step_profile import write_profile
from cs336.analysis.memory.profile import notes_path, read_notes, write_memory_profile, write_notes
from cs336.config import Profiler
from cs336.files import encode_json
from cs336.record import Failure, Status, WarningCode, encode_record, load_records, write_record
from cs336.report.formats import ON_REQUEST
from cs336.report.progress import StatusLine
from cs336.report.results import StudyResults
from cs336.report.terminal import print_run
from cs336.studies.operators import Op
from cs336.sweep.store import explanation_path
from tests.analysis.kernels.kineto_files import events_of, write_trace
from tests.analysis.kernels.tracing import training, write_export
from tests.analysis.memory.programs import Training
from tests.analysis.memory.snapshots import frame, snapshot_of
from tests.report import ceilings, studies
from tests.report.making import make_config, make_failure, make_record
from tests.report.sections.kernels.profiles import make_profile
from tests.report.sections.memory.profiles import make_memory

CONTROLS = "\x1b]0;owned\x07\x1b[2J\x1b[8m\x9b31m\x7f\u202e\u2066\u2028\n\r\t\b"
HOSTILE = f"{CONTROLS}\0{'x' * 550_000}{CONTROLS}"
SHORTER = f"{CONTROLS}\0{'x' * 10_000}{CONTROLS}"
"""For files with hundreds of texts."""
NAME = f"{CONTROLS}\udc9b"
"""Of a file; the last is a byte that is no UTF-8."""
CONTROL_CATEGORIES = {"Cc", "Cf", "Cs", "Zl", "Zp"}
MOST_PRINTED = 200_000
"""Characters of a command's output."""
MOST_WRITTEN = 500_000
"""Characters of one table for people, and of one text in a picture; fewer than HOSTILE has."""
LONGEST_CELL = 32_767
"""Characters of one value in a CSV file, as spreadsheets have it."""


def poisoned(value, text=HOSTILE):
    """The value with that text for every text in it, but where no such value can be made."""
    if is_dataclass(value):
        for field in fields(value):
            with contextlib.suppress(ValueError):
                value = replace(value, **{field.name: poisoned(getattr(value, field.name), text)})
        return value
    if isinstance(value, tuple):
        return tuple(poisoned(one, text) for one in value)
    return text if isinstance(value, str) and not isinstance(value, Enum) else value


def poisoned_record(record):
    """As `poisoned`, of a record; the source of its model too, which must be a name."""
    return replace(poisoned(record), config=replace(poisoned(record.config), tokens=None))


@pytest.fixture(autouse=True)
def drawn(monkeypatch):
    """Texts of all pictures."""
    found = []
    set_text = Text.set_text
    monkeypatch.setattr(
        Text, "set_text", lambda self, text: (found.append(str(text)), set_text(self, text))[1]
    )
    return found


def check(text, most, where):
    wrong = {c for c in set(text) if c != "\n" and unicodedata.category(c) in CONTROL_CATEGORIES}
    assert not wrong, where
    assert len(text) <= most, where


@pytest.fixture
def is_inert(capfd, drawn):
    """Look through what was printed, what lies in a directory, and what was drawn."""

    def look(directory=None):
        out, err = capfd.readouterr()
        if not out.startswith("{"):
            check(out, MOST_PRINTED, "output")
        check(err, MOST_PRINTED, "errors")
        for text in drawn:
            check(text, MOST_WRITTEN, "drawn")
        for path in sorted(directory.rglob("*")) if directory is not None else ():
            check(path.name, 255, "file name")
            assert path.name.isprintable()
            if path.suffix in (".csv", ".md", ".tex", ".typ"):
                text = path.read_bytes().decode()
                check(text, len(text) if path.suffix == ".csv" else MOST_WRITTEN, path.name)
                if path.suffix == ".csv":
                    assert (
                        max(len(cell) for row in csv.reader(text.splitlines()) for cell in row)
                        <= LONGEST_CELL
                    )

    return look


@pytest.fixture(scope="module")
def sweep_directory(tmp_path_factory):
    """Every kind of record that a sweep may have, with the profiles that belong to them."""
    directory = tmp_path_factory.mktemp("data") / "e2e_benchmark" / "hostile"
    (directory / "runs").mkdir(parents=True)
    failure = Failure(message="x", where="x", signal="x", traceback="x", log_tail="x")
    good = make_config(precision="bf16")
    records = [
        make_record(good, (0.1, 0.2), codes=(WarningCode.DRIFT,)),
        replace(make_failure(make_config(seed=1), Status.CRASHED), failure=failure),
        make_record(make_config(), (0.1, 0.2)),
    ]
    frame = '  File "mine.py\x1b]0;x\u202e", line 3, in f\x9b\n    \x1b[2J\n'
    own = replace(failure, traceback=f"Traceback:\n{frame * 10_000}Error: {SHORTER}")
    config = make_config(seed=2, model_factory="own.module:make")
    write_record(replace(make_failure(config, Status.CRASHED), failure=own), directory / "runs")
    for record in map(poisoned_record, records):
        write_record(record, directory / "runs")
    for profiler in (Profiler.KINETO, Profiler.MEMORY):
        record = poisoned_record(make_record(make_config(profiler=profiler), (0.1, 0.2)))
        write_record(record, directory / "runs")
        path = explanation_path(record.config, directory / "runs")
        path.parent.mkdir()
        if profiler is Profiler.KINETO:
            write_profile(replace(poisoned(make_profile(), SHORTER), source=CONTROLS), path)
        else:
            write_memory_profile(poisoned(make_memory(), SHORTER), path)
    return directory


@pytest.fixture
def bad_records(tmp_path):
    """A sweep's directory with a whole record, and files in whose names and contents only texts
    are wrong.
    """
    runs = tmp_path / "bad" / "runs"
    runs.mkdir(parents=True)
    record = make_record(make_config(), (0.1, 0.2))
    write_record(record, runs)
    (runs / f"{NAME}.json").write_bytes(b"{}")
    enum = encode_record(record).replace(
        b'"precision": "fp32"', b'"precision": "fp32\\u001b[2J' + b"y" * 200_000 + b'"'
    )
    (runs / "enum.json").write_bytes(enum)
    return runs.parent


def test_report(sweep_directory, is_inert):
    folder = sweep_directory.parents[1] / "ceilings" / "a"
    folder.mkdir(parents=True)
    (folder / "ceilings.json").write_bytes(encode_json(poisoned(ceilings.make_whole())))
    cli.main(["report", str(sweep_directory), "--tex", "--typ"])
    assert len(list(sweep_directory.rglob("*.png"))) > 1
    is_inert(sweep_directory)


def make(directory):
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def test_compare(sweep_directory, bad_records, tmp_path, is_inert):
    records = load_records(sweep_directory / "runs")[0]
    good = [
        record
        for record in records
        if record.status is Status.OK and record.config.profiler is Profiler.NONE
    ]
    for repeat in range(3):
        write_record(
            replace(good[0], config=replace(good[0].config, repeat=repeat)),
            make(tmp_path / NAME / "runs"),
        )
    a, b, c = str(tmp_path / NAME), str(sweep_directory), str(bad_records)
    for words in (
        (a, a),
        (b, c),
        (c, c),
        (a, a, "--a-against-a"),
        (b, b, "--a-against-a", "--allow-mixed"),
    ):
        cli.main(["compare", *words])
        is_inert()
    (other,) = (make(tmp_path / "data" / "e2e_benchmark" / "name" / "runs"),)
    write_record(good[0], other)
    flags = [" --size tiny --device cpu", " --size tiny --device cpu --seed 1"]
    assert cli.main(["compare", *flags, "--name", "name", "--output", str(tmp_path / "data")]) == 2
    is_inert()


def test_progress_of_a_sweep(sweep_directory, bad_records, is_inert):
    records, problems = (
        load_records(sweep_directory / "runs")[0],
        load_records(bad_records / "runs")[1],
    )
    with StatusLine() as listener:
        listener.planned(records[:1], [record.config for record in records], problems)
        for record in records:
            listener.started(record.config, None)
            listener.finished(record)
            print_run(record, Path(NAME))
    is_inert()


@pytest.fixture
def not_rendered(monkeypatch):
    """Pictures are made, and not turned into pixels, which takes most of the time; a sweep's
    report is.
    """
    monkeypatch.setattr(Figure, "savefig", lambda self, file, **options: file.write(b"no picture"))


def test_kernels(tmp_path, is_inert, not_rendered):
    texts = {name: f"{name}{SHORTER}" for name in ("forward", "backward", "optimizer", "step")}
    made = training(3)
    made.spans = [replace(span, name=texts.get(span.name, SHORTER)) for span in made.spans]
    made.kernels = [replace(kernel, name=f"{kernel.name}{SHORTER}") for kernel in made.kernels]
    named = [word for name, text in texts.items() for word in (f"--{name}", text.replace("\0", ""))]
    files = [
        write_export(tmp_path / f"{NAME}.sqlite", made),
        write_trace(tmp_path / f"{NAME}.json", events_of(made)),
        tmp_path / "profile.json",
    ]
    write_profile(replace(poisoned(make_profile(), SHORTER), source=CONTROLS), files[-1])
    for number, file in enumerate(files):
        out = tmp_path / f"out{number}"
        assert cli.main(["kernels", str(file), "--output", str(out), "--tex", "--typ"]) == 0
        is_inert(out)
        for words in (named, ["--forward", "none"]):
            assert cli.main(["kernels", str(file), *words]) in (0, 2)
            is_inert()


def test_memory(tmp_path, is_inert, not_rendered):
    run = Training()
    run.step(0)
    run.program.events += [
        {"action": f"{i}{SHORTER}", "addr": 0, "size": 0, "stream": 0} for i in range(30)
    ]
    for event in run.program.events:
        event["frames"] = [{**frame("f"), "name": SHORTER, "filename": SHORTER}]
        event[SHORTER] = 1
    snapshot = run.end(make(tmp_path / NAME)).rename(tmp_path / NAME / f"{NAME}.pickle")
    notes = read_notes(tmp_path / NAME / "snapshot.notes.json")
    write_notes(poisoned(notes, SHORTER), notes_path(snapshot))
    alone = tmp_path / "alone.pickle"
    note = {"name": SHORTER, "stage": "START", "device": 0, "time_us": 5}
    alone.write_bytes(pickle.dumps(snapshot_of(run.program, external_annotations=[note]), 4))
    write_memory_profile(poisoned(make_memory(), SHORTER), tmp_path / "memory.json")
    for number, file in enumerate((snapshot, alone, tmp_path / "memory.json")):
        out = tmp_path / f"out{number}"
        assert cli.main(["memory", str(file), "--output", str(out), "--tex", "--typ"]) == 0
        is_inert(out)


def test_studies(tmp_path, is_inert, not_rendered):
    cell = studies.make_cell()
    attention = studies.make_study(
        studies.make_result(cell), studies.make_failed(studies.make_cell("flash"))
    )
    fusion = studies.make_fusion(studies.make_row(), studies.make_lost_row(op=Op.RMS_NORM))
    for study in (attention, fusion, ceilings.make_whole()):
        StudyResults(poisoned(study, SHORTER)).write(tmp_path, ON_REQUEST)
    is_inert(tmp_path)
