"""The right reader for each file, and a clear line for any other."""

import gzip
import lzma
import os
from pathlib import Path

import pytest

from cs336_systems.analysis.columns import ProfileError
from cs336_systems.analysis.kernels.attribution import attribute
from cs336_systems.analysis.kernels.reading import read_trace
from tests.analysis.kernels.kineto_files import events_of, write_trace
from tests.analysis.kernels.tracing import make_trace, totals, training, write_export


def test_the_same_steps_from_either_profiler(tmp_path: Path) -> None:
    made = training(3)
    expected = totals(attribute(make_trace(made)), 1)
    (tmp_path / "zipped").write_bytes(gzip.compress(write_trace(tmp_path / "kineto", events_of(made)).read_bytes()))
    (tmp_path / "indented").write_bytes(b" \n\t" + (tmp_path / "kineto").read_bytes())
    write_export(tmp_path / "nsys", made)
    for name in ("nsys", "kineto", "zipped", "indented"):
        assert totals(attribute(read_trace(tmp_path / name)), 1) == expected, name


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("t", b"", "but it is empty"),
        ("t", b"hello", "but it is something else"),
        ("t", b"\x80\x04}.", "but it is a pickle"),
        ("t", lzma.compress(b"{}"), "xz -dk"),
        ("t", b"\x28\xb5\x2f\xfd", "zstd -dk"),
        ("a.nsys-rep", b"\x0a\x11", "nsys export --type=sqlite a.nsys-rep"),
        ("t", b"[]", "got `array`"),
        ("t", b"{}", "traceEvents"),
        ("t", b"SQLite format 3\0", "truncated"),
    ],
)
def test_any_other_file_is_said_with_what_to_do(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ProfileError) as caught:
        read_trace(tmp_path / name)
    assert said in str(caught.value)
    if "but it" in said:
        assert "the SQLite export of an nsys report, or a trace of torch.profiler" in str(caught.value)


def test_what_is_no_file_is_said_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path, said in [
        (tmp_path / "fifo", "no regular file"),
        (tmp_path, "a directory"),
        (tmp_path / "none", "No such file"),
        (tmp_path / "a\0b", "no name of a file"),
    ]:
        with pytest.raises(ProfileError, match=said):
            read_trace(path)
