"""Modules and attention: of a model whose kernels are known, and of traces that only resemble
it.
"""

from dataclasses import replace

import pytest

from cs336.analysis.kernels.modules import is_matmul_itself
from cs336.analysis.kernels.step_profile import StepProfile
from cs336.config import ModelConfig, RunConfig
from cs336.costs.accounting import attention_forward_flops
from tests.analysis.kernels.tracing import AUTOGRAD, Kernel, Recording, Span, ns, profile

OURS = ("attention", "attention.scores", "attention.softmax", "attention.values")
HANDOUT = (
    "scaled dot product attention",
    "computing attention scores",
    "computing softmax",
    "final matmul",
)
PUBLISHED = ("Scaled Dot Product Attention", "Attention Scores", "softmax", "matmul")
LAYERS, STEPS = 3, 2
MODEL = ModelConfig(
    vocab_size=11, context_length=8, d_model=16, d_ff=24, num_layers=LAYERS, num_heads=4
)
GEMM, SPLIT_K = "ampere_sgemm_128x64_tn", "void cublasLt::splitKreduce_kernel<32, 16>(int)"
SOFTMAX = "softmax_warp_forward"
LINEAR_NS, SCORES_NS, VALUES_NS, SOFTMAX_NS = 1_000, 10, 20, 3


class Model:
    """Writes down what an eager step launches: per layer 7 linear matmuls, attention in ranges,
    a norm.
    """

    def __init__(self, names: tuple[str, ...] = OURS) -> None:
        self.made, self.now, self.names = Recording(), 0, names
        for _ in range(STEPS):
            self.step()

    def tick(self) -> int:
        self.now += 10
        return self.now

    def launch(self, name: str, duration: int) -> None:
        launch = self.tick()
        self.made.kernels.append(
            Kernel(name, launch, start_ns=launch + 100_000, duration_ns=duration)
        )

    def inside(self, name: str, *launches: tuple[str, int]) -> None:
        start = self.tick()
        for launched in launches:
            self.launch(*launched)
        self.made.spans.append(Span(name, start, self.tick()))

    def phase(self, name: str, start: int) -> None:
        self.made.spans.append(Span(name, start, self.tick()))

    def step(self) -> None:
        start = self.tick()
        # not attention's, though they are called so
        self.inside("softmax", (SOFTMAX, 500))
        self.inside("matmul", (GEMM, LINEAR_NS))
        for _ in range(LAYERS):
            self.layer()
        self.launch("log_softmax", 7)
        self.phase("forward", start)
        start = self.tick()
        self.launch(GEMM, LINEAR_NS)
        self.phase("backward", start)

    def layer(self) -> None:
        for _ in range(3):
            self.launch(GEMM, LINEAR_NS)
        start = self.tick()
        self.inside(self.names[1], ("scale", 1), (GEMM, SCORES_NS), (SPLIT_K, 2))
        self.inside(self.names[2], (SOFTMAX, SOFTMAX_NS))
        self.inside(self.names[3], (GEMM, VALUES_NS))
        self.made.spans.append(Span(self.names[0], start, self.tick()))
        for _ in range(4):
            self.launch(GEMM, LINEAR_NS)


def parts(explained: StepProfile) -> dict[tuple[str, str], tuple[int, int, int, int]]:
    """Count, nanoseconds, matmuls and their nanoseconds of each part."""
    return {
        (row.phase.value, row.part.value): (
            row.count,
            ns(row.total_s),
            row.product_count,
            ns(row.product_s),
        )
        for row in explained.attention
    }


@pytest.mark.parametrize("names", [OURS, HANDOUT, PUBLISHED])
def test_attention_of_a_known_model(names: tuple[str, ...]) -> None:
    n = LAYERS * STEPS
    assert parts(profile(Model(names).made)) == {
        ("forward", "scores"): (3 * n, n * (1 + SCORES_NS + 2), n, n * SCORES_NS),
        ("forward", "softmax"): (n, n * SOFTMAX_NS, 0, 0),
        ("forward", "values"): (n, n * VALUES_NS, n, n * VALUES_NS),
    }


def test_attention_computed_again_in_backward_is_not_of_forward() -> None:
    made = Model().made
    expected = parts(profile(made))
    start = next(s for s in made.spans if s.name == "backward").start_ns
    made.spans += [
        Span("attention", start, start + 9, AUTOGRAD),
        Span("attention.scores", start + 1, start + 4, AUTOGRAD),
        Span("attention.softmax", start + 5, start + 8, AUTOGRAD),
    ]
    for offset, name in ((2, GEMM), (6, SOFTMAX)):
        made.kernels.append(Kernel(name, start + offset, AUTOGRAD, start + 100_000, 77))
    assert parts(profile(made)) == expected


def test_flops_are_those_of_the_model_for_each_pass() -> None:
    config = RunConfig(size="custom", model=MODEL, batch_size=3)
    explained = profile(Model().made, config=config)
    forward = attention_forward_flops(MODEL, 3)
    assert [(row.phase, row.part, row.flops) for row in explained.attention] == [
        ("forward", "scores", STEPS * forward["scores"]),
        ("forward", "softmax", STEPS * forward["softmax"]),
        ("forward", "values", STEPS * forward["values"]),
    ]
    for other in (None, replace(config, model=replace(MODEL, num_layers=4))):
        assert {row.flops for row in profile(Model().made, config=other).attention} == {None}


@pytest.mark.parametrize("order", [(1, 0, 2), (0, 2, 1), (2, 1, 0), (1, 2, 0)])
def test_parts_out_of_order_are_no_attention(order: tuple[int, int, int]) -> None:
    names = [("attention scores", "softmax", "matmul")[i] for i in order]
    made = Recording(spans=[Span("forward", 0, 100), Span("attention", 1, 99)])
    for i, name in enumerate(names):
        made.spans.append(Span(name, 10 * i + 10, 10 * i + 19))
        made.kernels.append(Kernel(name, 10 * i + 15, start_ns=200 + 20 * i))
    in_order = {"scores"} | ({"softmax"} if order.index(1) == order.index(0) + 1 else set())
    assert {row.part.value for row in profile(made).attention} == in_order


def test_kernels_of_ranges_inside_a_part_are_the_parts() -> None:
    spans = [Span("forward", 0, 100), Span("attention.scores", 10, 20), Span("einsum", 12, 18)]
    explained = profile(Recording([Kernel(GEMM, 15)], spans))
    assert parts(explained) == {("forward", "scores"): (1, 10, 1, 10)}


@pytest.mark.parametrize(
    ("name", "is_matmul"),
    [
        ("ampere_sgemm_128x64_tn", True),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", True),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_nt_align1>(T1::Params)", True),
        (
            "sm80_xmma_gemm_f32f32_f32f32_f32_nt_n_tilesize64x64x8_stage3_ffma_aligna4_execute_ker"
            "nel__5x_cublas",
            True,
        ),
        (
            "sm80_xmma_gemm_f32f32_f32f32_f32_nt_n_tilesize64x64x8_stage3_execute_split_k_kernel__"
            "5x_cublas",
            False,
        ),
        ("void cublasLt::splitKreduce_kernel<(int)32, (int)16, int, float>(T1 *)", False),
        ("void splitKreduce_kernel<32, 16, int, float>(float*)", False),
        ("void gemv2T_kernel_val<int, int, float, float>(float)", True),
        ("aten::mm", True),
        ("aten::addmm", True),
        ("aten::bmm", True),
        ("aten::linear", False),
        ("aten::matmul", False),
        ("softmax_warp_forward", False),
    ],
)
def test_matmuls_by_name(name: str, is_matmul: bool) -> None:
    assert is_matmul_itself(name) is is_matmul
