"""What operators take within a trace beside their results: measured on an H200 (PyTorch 2.11, cuDNN
9.19), or what the same operators do on the CPU.
"""

import random
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.profiler import profile

from cs336.config import Phase
from cs336.costs.allocator import MIB, Addresses
from cs336.costs.tape import Names
from cs336.costs.tracing import tracing

CUDNN = torch.ops.aten._scaled_dot_product_cudnn_attention
EFFICIENT = torch.ops.aten._scaled_dot_product_efficient_attention


@contextmanager
def traced():
    with tracing({}, limit_s=60) as trace:
        trace.begin(Phase.FORWARD)
        yield trace


def sizes(trace, label):
    """Bytes of the tensors whose labels begin so, in the order in which they are made."""
    tape = trace.tape()
    specs = map(tape.spec, range(len(tape.tensors)))
    return [spec.size_bytes for spec in specs if spec.label.startswith(label)]


def on_meta(*shape, dtype=torch.float32, grad=False):
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "context", "d_head", "measured"),
    [
        (48, 8, 8, 196, 64, 19_568_896),
        (16, 12, 12, 1024, 64, 51_118_336),
        (2, 16, 16, 500, 128, 8_256_256),
        (2, 32, 8, 2048, 128, 134_742_272),
        (4, 16, 4, 1024, 64, 33_816_832),
    ],
)
def test_workspace_of_cudnns_attention_is_that_measured(
    batch, heads, kv_heads, context, d_head, measured
) -> None:
    q = on_meta(batch, heads, context, d_head, dtype=torch.bfloat16, grad=True)
    k, v = [on_meta(batch, kv_heads, context, d_head, dtype=torch.bfloat16) for _ in "kv"]
    with traced() as trace:
        out = CUDNN(q, k, v, None, True, 0.0, True, False)[0]
        trace.begin(Phase.BACKWARD)
        out.backward(torch.empty_like(out))
    assert sizes(trace, "workspace of fused attention") == [measured]


@pytest.mark.parametrize(
    ("dtype", "d_head", "queries", "keys", "measured"),
    [
        (torch.float32, 8, 256, 256, 984_000),
        (torch.float32, 64, 130, 70, 738_000),
        (torch.float32, 80, 200, 200, 1_967_040),
        (torch.float32, 256, 1000, 1000, 15_736_320),
        (torch.bfloat16, 40, 1000, 1000, 3_936_000),
        (torch.bfloat16, 96, 130, 70, 1_966_560),
        (torch.bfloat16, 160, 130, 70, 6_882_720),
        (torch.bfloat16, 160, 1000, 1000, 37_361_280),
        (torch.bfloat16, 256, 256, 256, 11_798_400),
    ],
)
def test_buffers_of_efficient_attention_are_those_measured(
    dtype, d_head, queries, keys, measured
) -> None:
    """In fp32 the gradient's product with the output and its sums, which are made twice."""
    q = on_meta(3, 5, queries, d_head, dtype=dtype, grad=True)
    k, v = [on_meta(3, 5, keys, d_head, dtype=dtype) for _ in "kv"]
    with traced() as trace:
        out = EFFICIENT(q, k, v, None, True, 0.0, False)[0]
        trace.begin(Phase.BACKWARD)
        out.backward(torch.empty_like(out))
    assert sizes(trace, "workspace of fused attention") == [measured]
    count, product = (3, [4 * q.numel()]) if dtype is torch.float32 else (1, [])
    assert sizes(trace, "row sums") == count * [3 * 5 * queries * 4]
    assert sizes(trace, "output x gradient") == product


@pytest.mark.parametrize("d_head", [8, 64, 80, 128])
@pytest.mark.parametrize("kernel", [EFFICIENT, torch.ops.aten._scaled_dot_product_flash_attention])
def test_a_tape_with_named_axes_has_the_buffers_of_other_sizes(kernel, d_head) -> None:
    """One that is traced with heads of 152 has those of 8: up to the locks, a thousandth."""
    dtype = torch.float32 if kernel is EFFICIENT else torch.bfloat16
    mask = (None, True) if kernel is EFFICIENT else ()

    def tape_of(axes, batch, heads, context, width):
        q, k, v = [on_meta(batch, heads, context, width, dtype=dtype, grad=True) for _ in "qkv"]
        with tracing(axes, limit_s=60) as trace:
            trace.begin(Phase.FORWARD)
            out = kernel(q, k, v, *mask, 0.0, True)[0]
            trace.begin(Phase.BACKWARD)
            out.backward(torch.empty_like(out))
        return trace.tape()

    named = tape_of({"batch": 1009, "heads": 17, "T": 1013, "d_head": 152}, 1009, 17, 1013, 152)
    named.names = Names({"batch": 3, "heads": 5, "T": 256, "d_head": d_head})
    alone = tape_of({}, 3, 5, 256, d_head)
    sums = [
        sum(tape.spec(n).size_bytes for n in range(len(tape.tensors))) for tape in (named, alone)
    ]
    assert sums[0] == pytest.approx(sums[1], rel=1e-3)


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "measured"),
    [
        (9408, 2048, torch.bfloat16, [132 * MIB]),
        (6272, 2048, torch.bfloat16, [98 * MIB]),
        (64, 2048, torch.bfloat16, []),
    ],
)
def test_buffer_of_a_sum_is_that_measured(rows, columns, dtype, measured) -> None:
    gradient = on_meta(rows, columns, dtype=dtype)
    with traced() as trace:
        gradient.sum(dim=0)
    assert sizes(trace, "buffer of a sum") == measured


@pytest.mark.parametrize(
    ("image", "channels", "kernel", "stride", "dtype", "measured"),
    [
        ((48, 3, 224, 224), 512, 16, 16, torch.bfloat16, 50_266_112),
        ((48, 512, 64, 64), 128, 3, 1, torch.float32, int(482.25 * MIB)),
    ],
)
def test_workspace_of_a_convolution_is_that_measured(
    image, channels, kernel, stride, dtype, measured
) -> None:
    x, weight = (
        on_meta(*image, dtype=dtype),
        on_meta(channels, image[1], kernel, kernel, dtype=dtype),
    )
    with traced() as trace:
        F.conv2d(x, weight, stride=stride, padding=kernel // 2 if stride == 1 else 0)
    (size,) = sizes(trace, "channels last")
    assert size == pytest.approx(measured, rel=1e-3)


def test_partial_sums_of_a_tables_gradient_are_those_measured() -> None:
    table = on_meta(8192, 768, grad=True)
    with traced() as trace:
        out = F.embedding(on_meta(48, 256, dtype=torch.int64), table)
        trace.begin(Phase.BACKWARD)
        out.backward(torch.empty_like(out))
    # 27.5977 MiB
    assert sizes(trace, "sums by parts") == [9420 * 768 * 4]


LOSSES = [
    F.mse_loss,
    F.smooth_l1_loss,
    F.l1_loss,
    F.huber_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.soft_margin_loss,
]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_reduced_loss_keeps_what_it_keeps_on_the_cpu(loss, reduction) -> None:
    a, b = torch.rand(37, 53), torch.rand(37, 53)
    kept = loss(a, b, reduction=reduction).untyped_storage().nbytes()
    with traced() as trace:
        reduced = loss(a.to("meta"), b.to("meta"), reduction=reduction)
        tape = trace.tape()
        freed = {~event for event in tape.events if event < 0}
        living = [
            tape.spec(handle).size_bytes
            for handle in range(len(tape.tensors))
            if handle not in freed and tape.spec(handle).category != "buffers"
        ]
        del reduced
    assert max(living) == kept


class Branches(nn.Module):
    """Blocks whose inputs several operators use, drawn."""

    def __init__(self, draw):
        super().__init__()
        self.plan = [draw.choice(["linears", "residual", "product"]) for _ in range(4)]
        self.counts = [draw.randint(2, 4) for _ in self.plan]
        self.layers = nn.ModuleList(
            nn.ModuleList(nn.Linear(16, 16, bias=draw.random() < 0.5) for _ in range(count))
            for count in self.counts
        )
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in self.plan)

    def forward(self, x):
        for act, layers, norm in zip(self.plan, self.layers, self.norms, strict=True):
            if act == "linears":
                y = norm(x)
                x = sum(layer(y).tanh() for layer in layers)
            elif act == "residual":
                x = x + layers[0](norm(x))
            else:
                x = x.sin() * x.cos() * x.exp()
        return x


@pytest.mark.parametrize("seed", range(12))
def test_gradients_are_added_in_place_where_the_cpu_does(seed) -> None:
    """Oracle: PyTorch's own profiler counts additions that make a tensor in a real backward."""
    draw = random.Random(seed)
    model, is_flat = Branches(draw), draw.random() < 0.5
    shape = (32, 16) if is_flat else (4, 8, 16)
    loss = (model(torch.randn(shape, requires_grad=True) * 2) ** 2).mean()
    with profile() as profiled:
        loss.backward()
    real = [event.name for event in profiled.events()].count("aten::add")
    model.zero_grad()
    model.to("meta")
    with traced() as trace:
        out = (model(on_meta(*shape, grad=True) * 2) ** 2).mean()
        trace.begin(Phase.BACKWARD)
        out.backward()
    assert len(sizes(trace, "add of")) == real


def test_segments_lie_where_the_driver_of_an_h200_put_them() -> None:
    """Sizes (MiB) and addresses (MiB from the first) of segments in the order of their making, from
    a snapshot of a step of 12 layers.
    """
    sizes_of = (72, 72, 36, 144, 144, 72, 72, 18, 18, 18, 36, 72)
    seen = [0, -96, -160, -320, -480, -576, -672, -600, -504, -124, -736, -832]
    driver = Addresses()
    page = 2 * MIB // 512 + 1
    places = [driver.take(size * MIB) // page * 2 for size in sizes_of]
    assert [place - places[0] for place in places] == seen
