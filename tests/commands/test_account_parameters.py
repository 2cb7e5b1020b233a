"""`cs336 account --parameters`: the lecture's answers come with what they follow from; nonsense is refused."""

import re
from types import SimpleNamespace

import pytest

from cs336_systems.cli import main
from cs336_systems.commands import account

DAYS = ["--parameters", "70e9", "--tokens", "15e12", "--count", "1024", "--mfu", "0.5"]


def account_of(*words: str) -> int:
    return main(["account", *words])


def values(said: str) -> dict[str, str]:
    """The second column by the first, of all tables; of equal names the last."""
    return dict(re.findall(r"^(\S.*?)  +(\S+)", said, re.MULTILINE))


@pytest.mark.parametrize("device", [["--device-name", "H100"], ["--device-name=NVIDIA H100 80GB HBM3"]])
def test_the_lectures_days_come_with_what_they_follow_from(
    device: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert account_of(*DAYS, *device) == 0
    said = capsys.readouterr().out
    assert said.startswith("Training takes 143.9 days")
    found = values(said)
    assert found["FLOPs of the training"] == "6.3e24", "6 x 70e9 x 15e12"
    assert found["peak of one device"] == "989.5e12"
    assert float(found["FLOPs per second"]) == pytest.approx(1024 * 989.5e12 * 0.5, rel=1e-3)
    assert "data sheet" in said


def test_a_peak_may_be_given_and_scales_the_days(capsys: pytest.CaptureFixture[str]) -> None:
    assert account_of(*DAYS, "--peak-tflops", "1979") == 0
    assert capsys.readouterr().out.startswith("Training takes 71.96 days"), "half of 143.92"


@pytest.mark.parametrize(
    ("tokens", "title", "times"),
    [  # 6 x 1e9 x tokens over 0.5 x 1e15 FLOP/s
        ("1e14", "13,889 days", [("1.2e9", "s"), ("13,889", "days")]),
        ("7.2e9", "1.000 days", [("86,400", "s"), ("1.000", "days")]),
        ("7e9", "23.33 hours", [("84,000", "s"), ("23.33", "hours")]),
        ("1e7", "2.000 minutes", [("120.0", "s"), ("2.000", "minutes")]),
        ("1e6", "12.00 s", [("12.00", "s")]),
        ("1", "12e-6 s", [("12e-6", "s")]),
    ],
    ids=str,
)
def test_a_time_has_a_unit_that_can_be_read(
    tokens: str, title: str, times: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert account_of("--parameters", "1e9", "--tokens", tokens, "--peak-tflops", "1000") == 0
    said = capsys.readouterr().out
    assert said.startswith(f"Training takes {title}\n")
    assert re.findall(r"^time +(\S+) +(\S+)", said, re.MULTILINE) == times


def test_the_precision_chooses_the_peak(capsys: pytest.CaptureFixture[str]) -> None:
    assert account_of(*DAYS, "--device-name", "H100 80GB HBM3", "--precision", "fp32") == 0
    assert values(capsys.readouterr().out)["peak of one device"] == "67e12"


NUMBERS = ("--parameters", "--tokens", "--peak-tflops", "--count", "--mfu")
ALL_GIVEN = [*DAYS, "--peak-tflops", "1"]


@pytest.mark.parametrize(
    ("flag", "value"),
    [*((flag, "0") for flag in NUMBERS), *(("--tokens", value) for value in ("-1", "nan", "inf", "1e300"))],
)
def test_numbers_that_cannot_be_meant_are_refused(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = list(ALL_GIVEN)
    words[words.index(flag) + 1] = value
    assert account_of(*words) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert re.fullmatch(rf"error: {flag} must be positive [^\n]{{10,150}}\n", said.err)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--count", "8"], "--parameters"),
        (["--parameters", "7e9"], "--tokens"),
        (["--tokens", "7e9"], "--parameters"),
        ([*DAYS, "--size", "xl", "--fit"], "leave out --size, --fit"),
        ([*DAYS, "--d-model", "8"], "leave out --d-model"),
        ([*DAYS, "--device-name", "B200", "--precision", "fp32"], "give --peak-tflops"),
    ],
    ids=lambda value: None if isinstance(value, str) else repr(value[-2:])[:40],
)
def test_what_cannot_be_answered_is_refused_in_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert account_of(*words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch(r"error: [^\n\x1b]+\n", printed.err)
    assert said in printed.err


@pytest.mark.parametrize("gpus", [(), ("an H20, whose peak is not known",)], ids=["none", "unknown"])
def test_without_a_known_gpu_the_device_must_be_named(
    gpus: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(account, "visible_gpus", lambda: tuple(SimpleNamespace(name=name) for name in gpus))
    assert account_of(*DAYS) == 2
    assert "--device-name or --peak-tflops" in capsys.readouterr().err
