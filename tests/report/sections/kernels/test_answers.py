"""The course's questions on hand-made profiles (see profiles.py), whose answers can be worked out by hand."""

from dataclasses import replace

import pytest

from cs336_systems.analysis.kernels.classes import KernelClass
from cs336_systems.analysis.kernels.step_profile import ClassTimes
from cs336_systems.report.sections.kernels.answers import Question, answer, answers, facts_of
from cs336_systems.report.sections.kernels.entries import Explained
from cs336_systems.report.sections.kernels.facts import class_shares, forward_wall_s, top_kernel
from tests.report.making import HOSTILE, make_config, make_record
from tests.report.sections.kernels.profiles import (
    BACKWARD,
    FORWARD,
    GEMM_A,
    GEMM_B,
    MUL,
    NAMES,
    OPTIMIZER,
    UNKNOWN,
    make_classes,
    make_cpu_profile,
    make_entry,
    make_inference,
    make_kernels,
    make_profile,
)


def of(profile, clock_s=None):
    """A trace with forward's time in a run without a profiler, which is a quarter of its step."""
    return Explained(profile=profile, plain=None if clock_s is None else make_record(make_config(), (4 * clock_s,)))


def said(question, profile, clock_s=None):
    return answer(question, facts_of({"this": of(profile, clock_s)}), profile)


def without(profile, phase):
    """The profile of a run that had no such phase."""
    kept = {name: tuple(row for row in getattr(profile, name) if row.phase is not phase)
            for name in ("phases", "classes", "products", "kernels", "attention")}  # fmt: skip
    return replace(profile, **kept)


@pytest.mark.parametrize("clock_s", [None, 0.0079])
@pytest.mark.parametrize("make", [make_profile, make_inference, make_cpu_profile])
def test_every_question_has_an_answer_in_the_course_s_order(make, clock_s: float | None) -> None:
    assert all(said(question, make(), clock_s).endswith(".") for question in Question)
    headings = [line[3:] for line in answers([of(make(), clock_s)]).splitlines() if line.startswith("## ")]
    assert headings == [question.value for question in Question]


def test_forward_agrees_with_the_clock() -> None:
    """8 ms wall and 5 ms of kernels a step."""
    text = said(Question.FORWARD_TIME, make_profile(), 0.0079)
    assert text.startswith("By the trace, forward takes 8.00 ms, 5.00 ms of it GPU time in kernels.")
    assert "the clock says 7.90 ms: the trace is 1.27 % longer. They agree within 2 %." in text


@pytest.mark.parametrize(
    ("clock_s", "difference", "reason"),
    [
        (0.006, "33.3 % longer", "for 2.50 ms of forward the GPU was idle"),  # 2 ms, and 2.5 ms of late launches
        (0.005, "60.0 % longer", "They differ by more than 2 %"),  # 3 ms
        (0.010, "20.0 % shorter", "They differ by more than 2 %"),
    ],
)
def test_forward_differs_from_the_clock(clock_s: float, difference: str, reason: str) -> None:
    text = said(Question.FORWARD_TIME, make_profile(), clock_s)
    assert difference in text
    assert reason in text
    assert "They agree" not in text


def test_without_a_plain_run_the_clock_is_not_known() -> None:
    assert "is not known here: run the same without" in said(Question.FORWARD_TIME, make_profile())


def test_the_longest_kernel_is_the_same_one() -> None:
    """6 of 10 ms in forward, 14 of 30 ms in both, in two steps."""
    text = said(Question.TOP_KERNEL, make_profile())
    assert f"In a forward pass, {GEMM_A} (matrix product) with 3.00 ms, 60.0 %, in 4 launches." in text
    assert (
        f"the same one for forward and backward together: {GEMM_A} (matrix product) with 7.00 ms, 46.7 %, in 8" in text
    )


def test_the_longest_kernel_is_another_one() -> None:
    """Of both the sum counts: 5 + 5 ms of one that is longest in neither."""
    names = {FORWARD: (("first", 2, 6), ("both", 4, 5)), BACKWARD: (("second", 2, 6), ("both", 4, 5))}
    profile = make_profile(kernels=make_kernels(names))
    text = said(Question.TOP_KERNEL, profile)
    assert "In a forward pass, first (other) with 3.00 ms" in text
    assert "another one: both (other) with 5.00 ms, 33.3 %, in 4 launches." in text


def test_kernels_of_one_short_name_are_told_apart() -> None:
    names = {FORWARD: (("void gemm<1>(int)", 2, 6), ("void gemm<2>(int)", 2, 5), ("mul", 2, 8))}
    found = top_kernel(make_profile(kernels=make_kernels(names)), [FORWARD])
    assert found.name == "mul"


def test_what_matters_in_forward_besides_products() -> None:
    assert said(Question.OTHER_KERNELS, make_profile()) == (
        "Besides matrix products, 40.0 % of forward's GPU time: element-wise (vectorized_elementwise_kernel<mul>) "
        "30.0 %; softmax (cunn_SoftMaxForward) 10.0 %."
    )


def test_classes_past_the_fourth_are_counted() -> None:
    kinds = [kind for kind in KernelClass if kind is not KernelClass.MATMUL][:6]
    classes = tuple(ClassTimes(kind=kind, phase=FORWARD, count=2, total_s=0.001) for kind in kinds)
    text = said(Question.OTHER_KERNELS, make_profile(classes=classes))
    assert text.startswith("Besides matrix products, 100 % of")
    assert text.endswith("16.7 % and 2 more classes.")


def test_forward_of_products_alone() -> None:
    classes = (ClassTimes(kind=KernelClass.MATMUL, phase=FORWARD, count=2, total_s=0.001),)
    assert said(Question.OTHER_KERNELS, make_profile(classes=classes)).startswith("None")


def test_the_share_of_products_falls_with_the_optimizer() -> None:
    """6 of 10, 16 of 20 and 22 of 40 ms; element-wise 3 of 10 and 11 of 40."""
    text = said(Question.PRODUCT_SHARE, make_profile())
    assert "take 60.0 % of a forward pass, 80.0 % of a backward pass and 55.0 % of the whole training step." in text
    assert "element-wise 30.0 % and 27.5 %" in text
    assert "other 0 % and 5.00 %" in text


def test_runs_without_optimizer_or_backward_say_what_to_run() -> None:
    """22 of 30 ms in forward and backward."""
    both = said(Question.PRODUCT_SHARE, without(make_profile(), OPTIMIZER))
    assert "80.0 % of a backward pass and 73.3 % of both. There is no optimizer in this run: --mode train" in both
    for question in (Question.PRODUCT_SHARE, Question.TOP_KERNEL):
        assert "There is no backward pass in this run: --mode train" in said(question, make_inference())


def test_softmax_against_products_in_time_and_flops() -> None:
    """1 against 3 ms, 0.15 against 6 GFLOP: 0.333 / 0.025."""
    text = said(Question.SOFTMAX, make_profile())
    assert "the softmax takes 0.500 ms and the matrix products 1.50 ms: 0.333 of their time" in text
    assert "does 0.0250 of their FLOPs, so for each FLOP it takes 13.3 times as long" in text
    assert text.endswith("copies take another 0.500 ms.")


def test_without_flops_only_the_times_are_compared() -> None:
    profile = make_profile()
    unknown = tuple(replace(row, flops=None) for row in profile.attention)
    text = said(Question.SOFTMAX, replace(profile, attention=unknown))
    assert "0.333 of their time" in text
    assert "FLOPs are not known without the record" in text


def test_attention_that_cannot_be_told_says_what_to_run() -> None:
    profile = make_profile(attention=())
    assert "--attention naive and without --compile" in said(Question.SOFTMAX, profile)
    names = {**NAMES, FORWARD: (("flash_fwd_kernel", 2, 5), (MUL, 2, 5))}
    fused = replace(profile, classes=make_classes(names))
    assert said(Question.SOFTMAX, fused).startswith("Attention is fused")


def test_a_trace_without_forward_says_what_to_do() -> None:
    for question in Question:
        text = said(question, without(make_profile(), FORWARD))
        assert "nothing in it was launched in a phase called forward" in text
        assert "--forward RANGE" in text


def test_a_trace_of_a_cpu_has_operators() -> None:
    """12 of 20 ms in forward."""
    text = said(Question.TOP_KERNEL, make_cpu_profile())
    assert "aten::mm (matrix product) with 6.00 ms, 60.0 %, in 3 calls" in text
    assert "10.0 ms of it CPU time in operators" in said(Question.FORWARD_TIME, make_cpu_profile())


def test_sums_behind_the_answers() -> None:
    profile = make_profile()
    assert forward_wall_s(profile) == pytest.approx(0.008)
    assert forward_wall_s(without(profile, FORWARD)) is None
    assert sum(class_shares(profile).values()) == pytest.approx(1)
    assert class_shares(profile, []) == {}
    assert top_kernel(profile, [BACKWARD]).name in (GEMM_A, GEMM_B)
    assert top_kernel(profile, []) is None


def test_several_traces_have_the_least_and_the_largest() -> None:
    """Forward takes 8 ms by each trace, 6.25 and 7.9 ms by the clock; 6 and 9 of 10 ms are products."""
    names = {FORWARD: ((GEMM_A, 2, 9), (UNKNOWN, 2, 1))}
    other = make_inference(kernels=make_kernels(names), classes=make_classes(names))
    facts = facts_of({"one": of(make_profile(), 0.00625), "two": of(other, 0.0079)})
    time = answer(Question.FORWARD_TIME, facts, other)
    assert "forward takes 8.00 ms, 5.00 ms of it" in time
    assert "the clock says 6.25 ms (one) to 7.90 ms (two): the trace is 1.27 % longer (two) to 28.0 % longer" in time
    assert "In 1 of 2 they agree within 2 %. In 1 of 2 a profiler makes each launch slower, and for 2.50 ms of" in time
    assert "take 60.0 % (one) to 90.0 % (two) of a forward pass, 80.0 % of" in answer(
        Question.PRODUCT_SHARE, facts, other
    )
    others = answer(Question.OTHER_KERNELS, facts, other)
    assert "Besides matrix products, 10.0 % (two) to 40.0 % (one) of forward's GPU time" in others
    assert "other (mystery_of_mine) 0 % (one) to 10.0 % (two)" in others
    text = answers([make_entry(), make_entry(other, context_length=512)])
    assert text.count("\n**small ctx 128**: ") == text.count("\n**small ctx 512**: ") == len(Question)


def test_markup_in_a_name_is_inert() -> None:
    name = HOSTILE + "x" * 8000
    profile = make_profile(kernels=make_kernels({FORWARD: ((name, 2, 10),), BACKWARD: ((name, 2, 10),)}), source=name)
    text = answers([of(replace(profile, attention=()))])
    lines = text.splitlines()
    assert [line for line in lines if line.startswith("#")][1:] == [f"## {question.value}" for question in Question]
    assert len(lines) == 2 * (1 + 2 * len(Question)) - 1, "a heading and a paragraph each, blank lines between"
    assert "<" not in text
    assert not any(character in text for character in "\r\t\0\x1b")
    assert "](d)" not in text.replace("\\](d)", "")
