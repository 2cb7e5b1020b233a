"""What a command and a sweep say of their progress, in lines or on a terminal."""

import io
import re
import sys

import pytest

from cs336.report import progress
from cs336.report.progress import StatusLine
from tests.report.making import make_config, make_failure, make_record

ESCAPE = re.compile(r"\x1b\[(\??)(\d*)([A-Za-z])|(\r)|(\n)|([^\x1b\r\n]+)")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        """What is to be seen after all that was written, by the few controls that are used."""
        lines, row, column = [""], 0, 0
        for _, count, control, start, end, text in ESCAPE.findall(self.getvalue()):
            if control == "K":
                assert count == "2"
                lines[row] = ""
            elif control == "A":
                row -= int(count or 1)
            elif start:
                column = 0
            elif end:
                row, column = row + 1, 0
                lines += [""] * (row + 1 - len(lines))
            elif text:
                lines[row] = (
                    lines[row][:column].ljust(column) + text + lines[row][column + len(text) :]
                )
                column += len(text)
            else:
                assert control in "hlm", "shows the cursor, hides it, or colours"
        return lines


def use_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """From within a test: pytest sets the streams anew when one begins."""
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, terminal)
    return terminal


def test_a_terminal_shows_what_is_done_now_below_what_is_printed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = use_terminal(monkeypatch)
    with StatusLine() as status:
        status("first")
        assert re.fullmatch(r"\[ *\d+\.\d s\] first", terminal.screen()[-1])
        print("a note")
        status("second \x1b[2J" + "x" * 100, 4, 30)
        *above, line = terminal.screen()
        assert above == ["a note"]
        assert re.fullmatch(r"\[ *\d+\.\d s\] 5 of 30: second \\x1b\[2Jx+…", line)
        assert len(line) <= 40
    print("the result")
    assert [line for line in terminal.screen() if line] == ["a note", "the result"]
    assert terminal.getvalue().rindex("\x1b[?25h") > terminal.getvalue().rindex("\x1b[?25l"), (
        "the cursor is back"
    )


def test_the_line_goes_when_the_work_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = use_terminal(monkeypatch)

    def work() -> None:
        with StatusLine() as status:
            status("first")
            assert any(terminal.screen())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert not any(terminal.screen())


def test_elsewhere_each_has_a_line_at_its_beginning(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(progress, "_STARTED", 0.0)
    monkeypatch.setattr(progress, "monotonic", iter((1.25, 100.0)).__next__)
    with StatusLine() as status:
        status("first")
        assert capsys.readouterr().err == "[  1.2 s] first\n"
        status("second", 0, 2)
    out, err = capsys.readouterr()
    assert (out, err) == ("", "[100.0 s] 1 of 2: second\n")


def test_a_pipe_gets_one_line_for_each_result_and_no_bar(
    capsys: pytest.CaptureFixture[str],
) -> None:
    message = " ".join(["word"] * 100)
    done, failed = (
        make_record(make_config(), (0.1, 0.2)),
        make_failure(make_config(context_length=256), message=message),
    )
    with StatusLine() as listener:
        listener.planned([done], [failed.config], [])
        listener.finished(failed)
    *_, result = lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3, "kept records, the import, the result"
    assert result.endswith(message)
