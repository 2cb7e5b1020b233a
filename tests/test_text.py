"""One function makes a text inert; what is left must be what stood there, and no more of it than
was asked for.
"""

import unicodedata

import pytest

from cs336.text import inert_line, shortened


def test_every_control_character_is_an_escape_that_python_reads_back() -> None:
    kinds = {"Cc", "Cf", "Cs", "Zl", "Zp"}
    harmful = [
        character
        for character in map(chr, range(0x110000))
        if unicodedata.category(character) in kinds
    ]
    assert len(harmful) > 2000, "halves of characters among them"
    for character in harmful:
        shown = inert_line(f"a{character}b")
        assert shown.isprintable()
        assert shown.encode().decode("unicode_escape") == f"a{character}b"


@pytest.mark.parametrize(
    "text", ["", "plain", "C:\\new\\x1b", "Größe 5 µs ± 1 — ✓", "日本語", "a b", "e\u0301"]
)
def test_a_harmless_text_stays_as_it_is(text: str) -> None:
    assert inert_line(text) == shortened(text, 100) == text


@pytest.mark.parametrize("longest", [100, 101, 500])
@pytest.mark.parametrize("text", ["ab" * 5_000, "\x1b[2J" * 1_000, "\U000e0001" * 300])
def test_a_long_text_keeps_its_ends_and_says_what_is_missing(text: str, longest: int) -> None:
    shown = inert_line(text, longest)
    first, count, last = (
        part.encode().decode("unicode_escape") for part in shown.replace("…", "/").split(" / ")
    )
    assert len(shown) <= longest
    assert text.startswith(first)
    assert text.endswith(last)
    assert min(len(first), len(last)) > 0
    assert int(count.strip("(").split()[0]) == len(text) - len(first) - len(last)
    assert inert_line(shown, longest) == shown


def test_a_shortened_text_keeps_its_lines() -> None:
    text = "".join(f"line {i}\n" for i in range(10_000))
    shown = shortened(text, 300)
    assert len(shown) <= 300
    assert shown.startswith("line 0\nline 1\n")
    assert shown.endswith("line 9999\n")
