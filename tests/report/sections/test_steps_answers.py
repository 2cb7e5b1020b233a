"""Answers from hand-made records, whose numbers follow from a few round times."""

import re

import pytest

from cs336_systems.config import Mode, Precision
from cs336_systems.costs.time import step_time
from cs336_systems.report.frame import to_frame
from cs336_systems.report.sections.steps_answers import answers_text, step_answers
from cs336_systems.studies.ceilings_files import Ceilings
from tests.report.ceilings import make_rates
from tests.report.making import CODES, make_config, make_failure, make_record


def told(records):
    """The answers by a word that only their question has, each by the labels of its paragraphs."""
    words = ("beside", "spread", "warm-up", "precision", "attention", "checkpointing")
    found = step_answers(to_frame(records))
    return {
        next(word for word in words if word in question): {
            label: " ".join(text for other, text in paragraphs if other == label) for label, _ in paragraphs
        }
        for question, paragraphs in found
    }


def numbers(text):
    return [float(number.replace(",", "")) for number in re.findall(r"(?<![\w.])\d[\d,]*\.?\d*", text)]


def test_nothing_is_said_where_nothing_was_measured():
    assert answers_text([]) == answers_text([make_failure(make_config())]) == ""
    forward = told([make_record(make_config(mode=Mode.FORWARD), (0.1,))])
    assert forward == {}, "one time has no deviation, and there is no backward"


def test_backward_is_set_against_forward_and_the_spread_against_the_limit():
    """Of made records forward is 1/4, backward 1/2 and the optimizer 1/8 of a step."""
    answers = told([make_record(make_config(), (0.1, 0.1)), make_record(make_config("xl"), (0.1, 0.2))])
    (phases,) = answers["beside"].values()
    assert numbers(phases) == [2, 12.5]
    (spread,) = answers["spread"].values()
    assert {0.0, 47.1, 5.0, 1.0, 2.0} <= set(numbers(spread)), "0.0707 over 0.15"
    assert "xl" in spread.rpartition("(")[2]
    assert "small" not in spread.rpartition("(")[2]


def test_what_warm_up_changes_is_told_beside_the_most_of_it():
    """Without warm-up the mean of 1.0, 0.1 and 0.1 s is 4 times 0.1 s, and the first step 10 times."""
    records = [
        make_record(make_config(warmup_steps=0), (1.0, 0.1, 0.1)),
        make_record(make_config(warmup_steps=5), (0.1, 0.1, 0.1)),
        make_failure(make_config(warmup_steps=1)),
    ]
    (text,) = told(records)["warm-up"].values()
    assert {100.0, 400.0, 4.0, 1000.0, 10.0, 5.0} <= set(numbers(text))
    assert "warm-up" not in told(records[1:])


def test_the_trend_of_bf16_over_sizes_and_contexts():
    gains = {("small", 128): 0.5, ("small", 512): 2, ("xl", 128): 3, ("xl", 512): 5}
    records = [
        make_record(make_config(size, context, precision=precision), (1.5 if precision == "fp32" else 1.5 / gain,))
        for (size, context), gain in gains.items()
        for precision in (Precision.FP32, Precision.BF16)
    ]
    text = told(records)["precision"]["bf16"]
    whole, sizes, grow_size, contexts, grow_context = (numbers(part) for part in text.removesuffix(".").split(". "))
    assert (whole[0], whole[2]) == (0.5, 5.0)
    assert sizes == [512, 2, 5]
    assert contexts == [3, 128, 5, 512]
    assert grow_size == grow_context == [2, 2]
    slower = told([*records[:4], make_record(make_config("medium", 512), (1.5,)),
                   make_record(make_config("medium", 512, precision=Precision.BF16), (1.5,))])  # fmt: skip
    assert [0.0, 1.0] in [numbers(part) for part in slower["precision"]["bf16"].removesuffix(".").split(". ")]


def test_the_trend_on_several_gpus_is_of_one_that_is_named():
    """On the first bf16 gains 2 and 4, on the second 3 and 6; no gain is that of one over the other."""
    gains = {
        ("NVIDIA H200", "small"): 2,
        ("NVIDIA H200", "xl"): 4,
        ("NVIDIA A100", "small"): 3,
        ("NVIDIA A100", "xl"): 6,
    }
    records = [
        make_record(
            make_config(size, 512, precision=precision),
            ((1.5 if name == "NVIDIA H200" else 3) / (gain if precision == "bf16" else 1),),
            device_name=name,
        )
        for (name, size), gain in gains.items()
        for precision in (Precision.FP32, Precision.BF16)
    ]
    text = told(records)["precision"]["bf16"]
    assert "2.00 (small ctx 512 NVIDIA H200) to 6.00 (xl ctx 512 NVIDIA A100) times as fast" in text
    assert re.search(
        r"At context 512 on (?:NVIDIA H200 it is 2\.00 for small and 4|NVIDIA A100 it is 3\.00 for small and 6)\.00",
        text,
    )
    assert " on NVIDIA" not in told(records[:4])["precision"]["bf16"]


def test_each_choice_is_set_against_the_first():
    records = [make_record(make_config(), (0.6,)), make_record(make_config(compile="default"), (0.2,)),
               make_record(make_config(model={"attention": "sdpa"}), (0.3,))]  # fmt: skip
    answers = told(records)["attention"]
    assert {label: numbers(text) for label, text in answers.items()} == {
        "attention sdpa": [2.0],
        "compile default": [3.0],
    }


def test_the_best_group_of_checkpoints_is_named_with_what_it_costs():
    measured = {0: (1.0, 8), 1: (1.6, 5), 2: (1.5, 4), 4: (1.7, 6)}
    records = [
        make_record(make_config("xl", checkpoint_blocks=blocks), (time_s,), peak_bytes=peak * 2**30)
        for blocks, (time_s, peak) in measured.items()
    ]
    (text,) = told(records)["checkpointing"].values()
    best, others = text.split(" The others: ")
    assert numbers(best)[:2] == [4.0, 2.0]
    assert numbers(others)[:4] == [8.0, 2.0, 1000.0, pytest.approx(2 / 3, abs=1e-3)]
    assert "checkpointing" not in told(records[:1])


def test_a_step_far_from_its_forecast_is_told_with_both_times_and_its_warnings():
    """The first takes twice its forecast, the second exactly as long, the third half as long."""
    ceilings = Ceilings((make_rates(1e-3),))
    configs = [make_config("tiny", 16, batch_size=size) for size in (1, 2, 3)]
    times_s = [step_time(config, ceilings.curves("NVIDIA H200")).step_s for config in configs]
    records = [
        make_record(config, [factor * time_s], codes=codes)
        for config, time_s, factor, codes in zip(configs, times_s, (2, 1, 0.5), (CODES[:1], (), ()), strict=True)
    ]
    ((_, said),) = [each for each in step_answers(to_frame(records, ceilings)) if "far from" in each[0]]
    (_, slower), (_, faster) = said
    assert numbers(slower)[1:4] == pytest.approx([1, 2e3 * times_s[0], 1e3 * times_s[0]], rel=1e-3)
    assert str(CODES[0]) in slower
    assert numbers(faster)[1:4] == pytest.approx([3, 0.5e3 * times_s[2], 1e3 * times_s[2]], rel=1e-3)
    assert "far from" not in answers_text(records)
