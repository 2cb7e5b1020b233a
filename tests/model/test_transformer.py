"""The model against torch's own layers, a reference in fp64, properties, closed forms and
published figures.
"""

import cmath
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from cs336.config import SIZES, Arch, Attention, ModelConfig, RunConfig, SdpaBackend
from cs336.model.fast.model import FastLM
from cs336.model.transformer import (
    LayerNorm,
    RMSNorm,
    TransformerLM,
    naive_attention,
    rope_rotations,
    rotate_pairs,
)
from cs336.model.user_code import call_factory
from tests.model.fast.steps import roundings
from tests.own_models import BasicsTransformerLM
from tests.plain import plain_model
from tests.rounding import of_chain, of_sum, of_walk

# unequal on purpose: batch 5, tokens 7, context 8, width 12, feed-forward 20, layers 3, heads 2 of
# 6, vocabulary 11
CONFIG = ModelConfig(
    vocab_size=11, context_length=8, d_model=12, d_ff=20, num_layers=3, num_heads=2
)
GPT2 = replace(CONFIG, arch=Arch.GPT2)
BATCH, SEQ = 5, 7
VARIANTS = [
    pytest.param(replace(CONFIG, arch=arch, attention=attention), id=f"{arch}-{attention}")
    for arch in Arch
    for attention in Attention
]


def make(config):
    """A model whose every parameter matters: norms and biases are given values too."""
    torch.manual_seed(0)
    model = TransformerLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) / 4)
    return model


def tokens_for(config, seq=SEQ):
    return torch.randint(
        config.vocab_size, (BATCH, seq), generator=torch.Generator().manual_seed(1)
    )


def loss_of(logits, tokens):
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.roll(-1, 1).flatten())


# layers


def rotated_by_hand(x, theta):
    """RoPE pair by pair, with Python's complex numbers; x is (batch, seq, heads, d_head)."""
    result = x.double().clone()
    for b, t, h, i in torch.cartesian_prod(
        *(torch.arange(n) for n in (*x.shape[:3], x.shape[3] // 2))
    ).tolist():
        pair = complex(x[b, t, h, 2 * i], x[b, t, h, 2 * i + 1])
        turned = pair * cmath.exp(1j * t * theta ** (-2 * i / x.shape[3]))
        result[b, t, h, 2 * i], result[b, t, h, 2 * i + 1] = turned.real, turned.imag
    return result


@pytest.fixture(params=[False, True], ids=["eager", "as-compiled"])
def both_ways(request, monkeypatch):
    """RoPE is computed with complex numbers in eager mode, and with real ones while compiling."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: request.param)


@pytest.mark.parametrize("theta", [100.0, 10_000.0])
def test_rope_turns_pairs_like_complex_numbers(both_ways, theta):
    x = torch.randn(2, 5, 3, 6)
    rotated = rotate_pairs(x, rope_rotations(5, 6, theta))
    torch.testing.assert_close(rotated.double(), rotated_by_hand(x, theta), rtol=1e-5, atol=1e-6)


def test_rope_gradient_turns_back(both_ways):
    rotations, gradient = rope_rotations(5, 6, 100.0), torch.randn(2, 5, 3, 6)
    x = torch.randn(2, 5, 3, 6, requires_grad=True)
    rotate_pairs(x, rotations).backward(gradient)
    torch.testing.assert_close(rotate_pairs(x.grad, rotations), gradient, rtol=1e-5, atol=1e-6)


def test_rope_scores_depend_on_the_distance_alone(both_ways):
    rotations = rope_rotations(50, 6, 100.0)
    q, k = torch.randn(6), torch.randn(6)
    at_every_position = [
        rotate_pairs(vector.expand(1, 50, 1, 6), rotations)[0, :, 0] for vector in (q, k)
    ]
    scores = at_every_position[0] @ at_every_position[1].T
    pairs_of_q, pairs_of_k = (
        torch.view_as_complex(vector.double().view(3, 2)) for vector in (q, k)
    )
    angles = 100.0 ** (-torch.arange(3, dtype=torch.float64) / 3)
    # of angles up to 50
    allowed = (of_sum(torch.float32, 16) + 50 * of_chain(torch.float32, 2)) * q.norm() * k.norm()
    for distance in range(-40, 41, 8):
        turned = pairs_of_q.conj() * pairs_of_k * torch.exp(1j * distance * angles)
        assert (scores.diagonal(distance) - turned.sum().real).abs().max() < allowed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rope_computes_in_fp32(both_ways, dtype):
    x, rotations = torch.randn(2, 50, 3, 6).to(dtype), rope_rotations(50, 6, 10_000.0)
    with torch.autocast("cpu", dtype):
        rotated = rotate_pairs(x, rotations)
    assert rotated.dtype is dtype
    assert torch.equal(rotated, rotate_pairs(x.float(), rotations).to(dtype))


def test_rope_is_exact_far_out():
    cos, sin = rope_rotations(16_385, 4, 10_000.0)[16_384].unbind(-1)
    assert cos.tolist() == pytest.approx([math.cos(16_384), math.cos(163.84)], abs=1e-7)
    assert sin.tolist() == pytest.approx([math.sin(16_384), math.sin(163.84)], abs=1e-7)


@pytest.mark.parametrize("is_causal", [True, False])
def test_naive_attention_and_its_gradients_are_torchs(is_causal):
    """With any mask, in which each query attends to itself at least; masked scores get no
    gradient.
    """
    q, k, v = torch.randn(3, 2, 7, 6), torch.randn(3, 2, 7, 6), torch.randn(3, 2, 7, 10)
    mask = (
        torch.ones(7, 7, dtype=torch.bool).tril()
        if is_causal
        else (torch.rand(7, 7) < 0.4) | torch.eye(7).bool()
    )
    results = []
    for attend in (naive_attention, F.scaled_dot_product_attention):
        leaves = [part.clone().requires_grad_() for part in (q, k, v)]
        values = attend(*leaves, mask)
        results.append([values, *torch.autograd.grad(values.square().sum(), leaves)])
        assert all(torch.equal(leaf, part) for leaf, part in zip(leaves, (q, k, v), strict=True))
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize(("ours", "torchs"), [(RMSNorm, nn.RMSNorm), (LayerNorm, nn.LayerNorm)])
def test_norms_are_torchs(ours, torchs):
    # small, so that eps shows
    norm, reference, x = ours(12), torchs(12, eps=1e-5), torch.randn(5, 7, 12) / 100
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_()
    reference.load_state_dict(norm.state_dict())
    torch.testing.assert_close(norm(x), reference(x))


# whole models

OUR_NAMES = {
    "self_attn.out_proj": "attn.output_proj",
    "linear1": "ffn.w1",
    "linear2": "ffn.w2",
    "norm1": "ln1",
    "norm2": "ln2",
}
"""Layers of PyTorch's encoder layer, and ours."""


@pytest.mark.parametrize("attention", list(Attention))
def test_gpt2_follows_torchs_encoder_layers(attention):
    config = replace(GPT2, attention=attention)
    model, tokens = make(config), tokens_for(config)
    state = model.state_dict()
    x = (
        F.embedding(tokens, state["token_embeddings.weight"])
        + state["token_embeddings.positions"][:SEQ]
    )
    for i in range(config.num_layers):
        w = {name.removeprefix(f"layers.{i}."): value for name, value in state.items()}
        layer = nn.TransformerEncoderLayer(
            config.d_model,
            config.num_heads,
            config.d_ff,
            dropout=0.0,
            batch_first=True,
            norm_first=True,
            activation=lambda y: F.gelu(y, approximate="tanh"),
        )
        theirs = {}
        for kind in ("weight", "bias"):
            packed = torch.cat([w[f"attn.{part}_proj.{kind}"] for part in "qkv"])
            theirs[f"self_attn.in_proj_{kind}"] = packed
            for name, our_name in OUR_NAMES.items():
                theirs[f"{name}.{kind}"] = w[f"{our_name}.{kind}"]
        layer.load_state_dict(theirs)
        x = layer(x, src_mask=nn.Transformer.generate_square_subsequent_mask(SEQ), is_causal=True)
    x = F.layer_norm(x, (config.d_model,), state["ln_final.weight"], state["ln_final.bias"])
    torch.testing.assert_close(
        model(tokens), x @ state["token_embeddings.weight"].T, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("config", VARIANTS)
def test_no_gradient_comes_from_the_future(config):
    model = make(config)
    inputs = []

    def catch(_module, _args, output):
        inputs.append(output.detach().requires_grad_())
        return inputs[-1]

    model.token_embeddings.register_forward_hook(catch)
    logits = model(tokens_for(config))
    for t in range(SEQ):
        (gradient,) = torch.autograd.grad(logits[2, t].square().sum(), inputs[0], retain_graph=True)
        reached = gradient.abs().sum(-1) > 0
        expected = torch.zeros(BATCH, SEQ, dtype=torch.bool)
        expected[2, : t + 1] = True
        assert torch.equal(reached, expected)


@pytest.mark.parametrize("config", VARIANTS)
@pytest.mark.parametrize("seq", [1, 3, 8])
def test_a_short_sequence_is_a_prefix(config, seq):
    model, tokens = make(config), tokens_for(config, 8)
    torch.testing.assert_close(model(tokens[:, :seq]), model(tokens)[:, :seq], rtol=1e-4, atol=1e-5)


def test_a_long_sequence_is_refused():
    reference = make(CONFIG)
    for model in (reference, FastLM(reference, RunConfig(size="custom", model=CONFIG))):
        with pytest.raises(ValueError, match="needed at most context_length = 8 a row, got 9"):
            model(tokens_for(CONFIG, 9))


@pytest.mark.parametrize("attention", list(Attention))
def test_cs336_computes_what_the_course_s_model_computes_with_its_state_and_with_ours(attention):
    config = replace(CONFIG, attention=attention, rope_theta=50.0)
    ours, tokens = make(config), tokens_for(config)
    theirs, other = (call_factory(BasicsTransformerLM, config).double() for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    for model in (ours, theirs):
        loss_of(model(tokens), tokens).backward()
    torch.testing.assert_close(ours(tokens).double(), theirs(tokens), rtol=1e-4, atol=1e-4)
    expected = {name: p.grad for name, p in theirs.named_parameters()}
    for name, p in ours.named_parameters():
        torch.testing.assert_close(
            p.grad.double(), expected[name], rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )
    ours.load_state_dict(other.state_dict())
    torch.testing.assert_close(ours(tokens).double(), other(tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attention", Attention)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_queries_are_heads_whose_keys_and_values_are_equal(attention, kv_heads):
    """In fp64, where both ways round alike; the gradient of what is shared is a sum."""
    shared = make(replace(CONFIG, attention=attention, num_kv_heads=kv_heads)).double()
    full = make(replace(CONFIG, attention=attention)).double()
    group, d_head = CONFIG.num_heads // kv_heads, CONFIG.d_head
    assert shared.state_dict().keys() == full.state_dict().keys()
    weights = shared.state_dict()
    for name, weight in weights.items():
        if "k_proj" in name or "v_proj" in name:
            assert weight.shape == (kv_heads * d_head, CONFIG.d_model)
            heads = weight.unflatten(0, (kv_heads, d_head))
            weights[name] = heads.repeat_interleave(group, dim=0).flatten(0, 1)
    full.load_state_dict(weights)
    tokens = tokens_for(CONFIG)
    for model in (shared, full):
        loss_of(model(tokens), tokens).backward()
    torch.testing.assert_close(shared(tokens), full(tokens))
    gradients = {name: parameter.grad for name, parameter in full.named_parameters()}
    for name, parameter in shared.named_parameters():
        expected = gradients[name]
        if "k_proj" in name or "v_proj" in name:
            heads = expected.unflatten(0, (kv_heads, group, d_head))
            expected = heads.sum(1).flatten(0, 1)
        torch.testing.assert_close(parameter.grad, expected)


# parameters


@pytest.mark.parametrize(
    ("size", "figure"),
    [
        ("small", "129M"),
        ("medium", "423M"),
        ("large", "969M"),
        ("xl", "2.00B"),
        ("2.7B", "3.41B"),
        ("8B", "8.13B"),
        ("10B", "12.8B"),
        # as counted for the published checkpoints
        ("gpt2", "124439808"),
        ("gpt2-medium", "354823168"),
        ("gpt2-large", "774030080"),
        ("gpt2-xl", "1557611200"),
    ],
)
def test_presets_hold_the_published_figures(size, figure):
    with torch.device("meta"):
        model = TransformerLM(SIZES[size])
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    count, unit = sum(p.numel() for p in model.parameters()), figure[-1]
    if unit in "MB":
        decimals = len(figure.partition(".")[2][:-1])
        assert f"{count / {'M': 1e6, 'B': 1e9}[unit]:.{decimals}f}{unit}" == figure
    else:
        assert count == int(figure)


def std_of_cut_normal(cut):
    """Standard deviation of a unit normal cut at -cut and cut."""
    density, inside = (
        math.exp(-cut * cut / 2) / math.sqrt(2 * math.pi),
        math.erf(cut / math.sqrt(2)),
    )
    return math.sqrt(1 - 2 * cut * density / inside)


def test_cs336_is_initialised_as_in_the_course():
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=1000, context_length=8, d_model=96, d_ff=160, num_layers=2, num_heads=2
    )
    for name, p in TransformerLM(config).named_parameters():
        if p.dim() == 1:
            assert torch.equal(p, torch.ones_like(p)), name
            continue
        std = 1.0 if "token_embeddings" in name else math.sqrt(2 / (p.shape[0] + p.shape[1]))
        assert p.std().item() == pytest.approx(std * std_of_cut_normal(3), rel=0.03), name
        assert 2.8 * std < p.abs().max().item() <= 3 * std * (1 + 1e-6), name
        assert abs(p.mean().item()) < 5 * std / math.sqrt(p.numel()), name


def test_gpt2_is_initialised_as_published():
    torch.manual_seed(0)
    config = ModelConfig(
        arch=Arch.GPT2,
        vocab_size=1000,
        context_length=80,
        d_model=96,
        d_ff=160,
        num_layers=8,
        num_heads=2,
    )
    for name, p in TransformerLM(config).named_parameters():
        if p.dim() == 1:
            assert torch.equal(p, torch.full_like(p, float("ln" in name and "weight" in name))), (
                name
            )
            continue
        std = 0.02 / 4 if "output_proj" in name or "w2" in name else 0.02
        assert p.std().item() == pytest.approx(std, rel=0.03), name
        assert p.abs().max().item() > 3.2 * std, name


class Called(TorchDispatchMode):
    """The names of the operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


# precision and compilation


@pytest.mark.parametrize("config", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(config, dtype):
    model, tokens = make(config), tokens_for(config)
    dtypes = {}
    for name, module in model.named_modules():
        module.register_forward_hook(
            lambda m, a, out, n=name: dtypes.setdefault(n, set()).add(out.dtype)
        )
    with torch.autocast("cpu", dtype):
        logits = model(tokens)
        loss = loss_of(logits, tokens)
    loss.backward()
    for name in (
        "token_embeddings",
        "layers.0",
        "layers.2",
        "layers.1.ln1",
        "layers.1.ln2",
        "ln_final",
    ):
        assert dtypes[name] == {torch.float32}, name  # the residual stream and the norms
    for name in (
        "layers.0.attn",
        "layers.0.attn.q_proj",
        "layers.2.ffn",
        "layers.2.ffn.w1",
        "lm_head",
        "",
    ):
        assert dtypes[name] == {dtype}, name
    assert all(
        p.grad.dtype is torch.float32 and p.grad.isfinite().all() for p in model.parameters()
    )
    exact = model(tokens)
    assert (logits - exact).norm() < of_walk(dtype, roundings(config) // 2) * exact.norm()


@pytest.fixture(scope="module")
def plain():
    return plain_model()


@pytest.mark.parametrize("config", [VARIANTS[0], VARIANTS[-1]])
def test_compiles_without_a_break(plain, config):
    """The closer comparison, in fp32, by block, and the casts of bf16 in the whole model."""
    by_block = config.attention is Attention.NAIVE
    autocast = None if by_block else torch.bfloat16
    config = replace(config, num_layers=2)
    if config.attention is Attention.SDPA:
        config = replace(config, sdpa_backend=SdpaBackend.MATH)
    torch.manual_seed(0)
    model, tokens = plain.TransformerLM(config), tokens_for(config)
    results = []
    for compiled in (False, True):
        if compiled:
            torch._dynamo.reset()
            for module in model.layers if by_block else (model,):
                module.compile(fullgraph=True, backend="aot_eager_default_partitioner")
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            logits = model(tokens)
        results.append(
            (logits, *torch.autograd.grad(loss_of(logits, tokens), list(model.parameters())))
        )
    tolerance = of_walk(autocast or torch.float32, 2 * roundings(config))
    names = ["logits", *(name for name, _ in model.named_parameters())]
    for name, one, other in zip(names, *results, strict=True):
        if not name.endswith("k_proj.bias"):  # whose gradient is nothing but rounding
            assert (one - other).norm() <= tolerance * one.norm(), name


ATEN_OF_BACKEND = {
    SdpaBackend.MATH: "bmm",
    SdpaBackend.FLASH: "_scaled_dot_product_flash_attention_for_cpu",
}


@pytest.mark.parametrize("backend", list(ATEN_OF_BACKEND))
def test_the_sdpa_backend_is_in_force(plain, backend):
    config = replace(CONFIG, attention=Attention.SDPA, sdpa_backend=backend, num_layers=2)
    model = plain.TransformerLM(config)
    with Called() as called:
        model(tokens_for(config))
    assert called.names & set(ATEN_OF_BACKEND.values()) == {ATEN_OF_BACKEND[backend]}


@pytest.mark.gpu
@pytest.mark.parametrize("config", VARIANTS)
def test_is_born_on_the_gpu(config):
    with torch.device("cuda"):
        model = TransformerLM(config)
    assert all(tensor.is_cuda for tensor in (*model.parameters(), *model.buffers()))
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    tokens = tokens_for(config)
    reference = TransformerLM(config)
    reference.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(tokens.cuda()).cpu(), reference(tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", list(SdpaBackend))
def test_every_sdpa_backend_runs_on_the_gpu(backend):
    config = ModelConfig(
        vocab_size=11,
        context_length=160,
        d_model=128,
        d_ff=192,
        num_layers=2,
        num_heads=2,
        attention=Attention.SDPA,
        sdpa_backend=backend,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = TransformerLM(config)
        naive = TransformerLM(
            replace(config, attention=Attention.NAIVE, sdpa_backend=SdpaBackend.AUTO)
        )
        tokens = torch.randint(config.vocab_size, (3, 130))
    naive.load_state_dict(model.state_dict())
    losses = []
    for either in (model, naive):
        with torch.autocast("cuda", torch.bfloat16):
            losses.append(loss_of(either(tokens), tokens))
        losses[-1].backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=0.01)
    assert all(p.grad.isfinite().all() for p in model.parameters())
