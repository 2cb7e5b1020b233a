"""FLOPs and parameters against what torch dispatches and holds; causal attention against its
pairs.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

from cs336.config import (
    SIZES,
    Arch,
    Attention,
    Mode,
    ModelConfig,
    OptimizerKind,
    Precision,
    RunConfig,
    SdpaBackend,
)
from cs336.costs.accounting import (
    ADAMW_BYTES,
    ADAMW_FLOPS,
    Component,
    PartWork,
    attention_forward_flops,
    component_flops,
    count_parameters,
    forward_flops,
    forward_work,
    least_time_s,
    mfu,
    optimizer_work,
    parameters_by_component,
    step_flops,
)
from cs336.costs.hardware import find_device
from cs336.measure.precision import AUTOCAST_DTYPES
from cs336.model.optimizer import make_optimizer
from cs336.model.transformer import TransformerLM, attention_backend

H100 = "NVIDIA H100 80GB HBM3"

aten = torch.ops.aten
UNEQUAL = [
    ModelConfig(vocab_size=11, context_length=8, d_model=16, d_ff=24, num_layers=2, num_heads=4),
    ModelConfig(vocab_size=37, context_length=5, d_model=12, d_ff=7, num_layers=3, num_heads=2),
    ModelConfig(vocab_size=3, context_length=1, d_model=2, d_ff=1, num_layers=1, num_heads=1),
    ModelConfig(vocab_size=50, context_length=33, d_model=30, d_ff=100, num_layers=1, num_heads=3),
]
GROUPED = replace(UNEQUAL[0], d_model=24, num_heads=6, num_kv_heads=2)


def run_config(model: ModelConfig, **changes) -> RunConfig:
    return RunConfig(size="custom", model=model, **changes)


every_arch = pytest.mark.parametrize("arch", Arch)
every_shape = pytest.mark.parametrize("shape", UNEQUAL, ids=lambda shape: f"d{shape.d_model}")
every_batch = pytest.mark.parametrize("batch_size", [1, 3])
ATTENTION = (Component.SCORES, Component.VALUES)


@every_arch
@every_shape
def test_every_part_is_as_torch_counts_its_module(arch, shape) -> None:
    """One counter over both passes, which knows in backward too whose product it is, but not of
    three that share x.
    """
    config = run_config(replace(shape, arch=arch), batch_size=3)
    model = TransformerLM(config.model)
    with FlopCounterMode(display=False) as counter:
        logits = model(torch.zeros(3, shape.context_length, dtype=torch.long))
        forward, half = flops_by_module(counter), counter.get_total_flops()
        logits.sum().backward()
        backward, step = flops_by_module(counter), counter.get_total_flops()
    backward.subtract(forward)
    assert {mode: step_flops(replace(config, mode=mode)) for mode in Mode} == {
        Mode.INFERENCE: half,
        Mode.FORWARD: half,
        Mode.FORWARD_BACKWARD: step,
        Mode.TRAIN: step,
    }
    flops = attention_forward_flops(config.model, 3)
    assert flops["scores"] == flops["values"]
    assert flops["scores"] + flops["values"] == forward["attn bmm"]
    for pass_name, counted in (("forward", forward), ("backward", backward)):
        told = {part.component: getattr(part, pass_name) for part in component_flops(config)}
        attention = told[Component.SCORES] + told[Component.VALUES]
        assert attention == counted["attn bmm"], pass_name
        assert (
            told[Component.QKV]
            == counted["attn"] - counted["attn bmm"] - counted["attn.output_proj"]
        ), pass_name
        assert told[Component.OUTPUT] == counted["attn.output_proj"], pass_name
        assert told[Component.FFN] == counted["ffn"], pass_name
        assert told[Component.HEAD] == counted["lm_head"], pass_name
        assert told[Component.EMBEDDING] == counted["token_embeddings"] == 0, pass_name


def flops_by_module(counter: FlopCounterMode) -> Counter[str]:
    """FLOPs of all layers by the module's name in its layer; of attention's own products also
    alone.
    """
    counted: Counter[str] = Counter()
    for name, by_operation in counter.get_flop_counts().items():
        short = re.sub(r"^TransformerLM\.(layers\.\d+\.)?", "", name)
        counted[short] += sum(by_operation.values())
        if short == "attn":
            counted["attn bmm"] += by_operation[aten.bmm]
    return counted


@every_shape
@every_batch
def test_causal_counts_the_pairs_of_a_query_and_no_later_key(shape, batch_size) -> None:
    """Each query multiplied by the keys up to its own, and its weights by their values, one
    query after the other.
    """
    with FlopCounterMode(display=False) as scores, torch.device("meta"):
        for position in range(shape.context_length):
            torch.empty(1, shape.d_head) @ torch.empty(shape.d_head, position + 1)
    with FlopCounterMode(display=False) as values, torch.device("meta"):
        for position in range(shape.context_length):
            torch.empty(1, position + 1) @ torch.empty(position + 1, shape.d_head)
    heads = shape.num_layers * batch_size * shape.num_heads
    full, causal = (forward_flops(shape, batch_size, causal=causal) for causal in (False, True))
    assert causal[Component.SCORES] == heads * scores.get_total_flops()
    assert causal[Component.VALUES] == heads * values.get_total_flops()
    assert {part: flops for part, flops in full.items() if part not in ATTENTION} == {
        part: flops for part, flops in causal.items() if part not in ATTENTION
    }


class Counted(float):
    """A number that counts the operations on it and its kind."""

    count = 0

    def _counted(self, value: float) -> "Counted":
        Counted.count += 1
        return Counted(value)

    def __add__(self, other):
        return self._counted(float(self) + float(other))

    def __sub__(self, other):
        return self._counted(float(self) - float(other))

    def __mul__(self, other):
        return self._counted(float(self) * float(other))

    def __truediv__(self, other):
        return self._counted(float(self) / float(other))

    def larger(self, other):
        return self._counted(max(float(self), float(other)))

    def exp(self):
        return self._counted(math.exp(self))

    def sqrt(self):
        return self._counted(math.sqrt(self))


def test_softmax_counts_each_operation_of_its_definition() -> None:
    """A row at a time, as it is told, and the numbers are torch's."""
    model = UNEQUAL[1]
    rows = 3 * model.num_layers * model.num_heads * model.context_length
    scores = torch.randn(model.context_length, dtype=torch.float64)

    Counted.count = 0
    row, largest, total = [Counted(x) for x in scores.tolist()], Counted(-math.inf), Counted(0)
    for x in row:
        largest = largest.larger(x)
    powers = [(x - largest).exp() for x in row]
    for x in powers:
        total = total + x
    weights = [x / total for x in powers]
    assert attention_forward_flops(model, 3)["softmax"] == rows * Counted.count

    torch.testing.assert_close(torch.tensor(weights, dtype=torch.float64), scores.softmax(dim=0))


COMPONENT_OF = {
    r"token_embeddings\.weight": Component.EMBEDDING,
    r"token_embeddings\.positions": Component.EMBEDDING,
    r"layers\.\d+\.ln[12]\..*|ln_final\..*": Component.NORMS,
    r"layers\.\d+\.attn\.[qkv]_proj\..*": Component.QKV,
    r"layers\.\d+\.attn\.output_proj\..*": Component.OUTPUT,
    r"layers\.\d+\.ffn\..*": Component.FFN,
    r"lm_head\.weight": Component.HEAD,
}
"""Where the parameters of the model belong, by name; a tied table goes by the head's."""


@every_arch
@every_shape
def test_parameters_of_each_part_are_those_that_torch_holds(arch, shape) -> None:
    config = replace(shape, arch=arch)
    model = TransformerLM(config)
    held: Counter[Component] = Counter()
    for parameter in model.parameters():
        names = [n for n, p in model.named_parameters(remove_duplicate=False) if p is parameter]
        [component] = {
            part for pattern, part in COMPONENT_OF.items() if re.fullmatch(pattern, names[-1])
        }
        held[component] += parameter.numel()
    assert parameters_by_component(config) == held


def test_the_users_own_model_has_no_known_flops() -> None:
    config = run_config(UNEQUAL[0], model_factory="package.module:factory")
    assert step_flops(config) is None
    with pytest.raises(ValueError, match=r"package\.module:factory"):
        component_flops(config)


def test_mfu_is_relative_to_the_dense_peak() -> None:
    assert mfu(156e12, "NVIDIA A100-SXM4-80GB", Precision.BF16) == 0.5
    assert mfu(19.5e12, "NVIDIA A100-SXM4-80GB", Precision.FP32) == 1
    assert mfu(156e12, "NVIDIA A100-SXM4-80GB", Precision.TF32) == 1


@contextmanager
def autocast(precision: Precision) -> Iterator[None]:
    dtype = AUTOCAST_DTYPES.get(precision)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        yield


class MovedBytes(TorchDispatchMode):
    """Bytes of the factors and results of a model's products, and of its lookups, by part of the
    model.

    What is at one address counts once for a part and layer. The tensors are kept, so that no
    address comes twice.
    """

    def __init__(self, tracker: ModuleTracker, context_length: int) -> None:
        super().__init__()
        self.tracker, self.context_length = tracker, context_length
        self.tensors: dict[tuple[Component, str], dict[int, Tensor]] = {}
        self.lookup_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        name = func.overloadpacket
        where = max(self.tracker.parents, key=len)
        if name in (aten.mm, aten.addmm, aten.bmm):
            is_scores = name is aten.bmm and out.shape[-1] == self.context_length
            part = self._part(where, Component.SCORES if is_scores else Component.VALUES)
            self._add(part, where, [*args, out])
        elif name is aten._scaled_dot_product_flash_attention_for_cpu:
            self._add(Component.SCORES, where, list(args[:2]))
            self._add(Component.VALUES, where, [args[2], out[0]])
        elif name is aten.embedding:
            self.lookup_bytes += args[1].nbytes + 2 * out.nbytes
        return out

    def _part(self, where: str, attention: Component) -> Component:
        ends = {
            "q_proj": Component.QKV,
            "k_proj": Component.QKV,
            "v_proj": Component.QKV,
            "attn": attention,
        }
        ends |= {"output_proj": Component.OUTPUT, "lm_head": Component.HEAD}
        return ends.get(where.rpartition(".")[2], Component.FFN)

    def _add(self, part: Component, where: str, tensors: list[object]) -> None:
        layer = "".join(re.findall(r"layers\.\d+", where))
        for tensor in tensors:
            assert isinstance(tensor, Tensor)
            self.tensors.setdefault((part, layer), {})[tensor.data_ptr()] = tensor

    def of(self, wanted: Component) -> int:
        lists = (tensors.values() for (part, _), tensors in self.tensors.items() if part is wanted)
        return sum(tensor.nbytes for tensors in lists for tensor in tensors)


@every_arch
@every_shape
@pytest.mark.parametrize("attention", [Attention.NAIVE, Attention.SDPA])
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_least_bytes_are_those_of_the_tensors_that_products_read_and_write(
    arch, shape, attention, precision
) -> None:
    config = run_config(
        replace(shape, arch=arch, attention=attention), batch_size=3, precision=precision
    )
    model = TransformerLM(config.model)
    tracker = ModuleTracker()
    with (
        torch.no_grad(),
        autocast(precision),
        tracker,
        MovedBytes(tracker, shape.context_length) as moved,
    ):
        model(torch.zeros(3, shape.context_length, dtype=torch.long))
    work = {part.name: part for part in forward_work(config)}
    for component in set(work) - {Component.EMBEDDING}:
        assert work[component].moved_bytes == moved.of(component), component
    positions = model.token_embeddings.positions
    added_bytes = 0 if positions is None else positions.nbytes
    assert work[Component.EMBEDDING].moved_bytes == moved.lookup_bytes + added_bytes
    flops, length = forward_flops(config.model, 3), shape.context_length
    if attention is Attention.SDPA:  # the kernel computes the pairs of a query and no later key
        flops |= {
            part: flops[part] * (length + 1) // (2 * length)
            for part in (Component.SCORES, Component.VALUES)
        }
    assert {name: part.flops for name, part in work.items()} == flops


def test_adamw_counts_each_operation_of_its_definition() -> None:
    """One parameter, as the algorithm has it, and the number is torch's."""
    lr, (beta1, beta2), eps, decay = 0.01, (0.9, 0.95), 1e-8, 0.1
    start, gradient = 0.7, -0.3
    parameter = torch.nn.Parameter(torch.tensor([start], dtype=torch.float64))
    parameter.grad = torch.tensor([gradient], dtype=torch.float64)
    torch.optim.AdamW([parameter], lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=decay).step()

    # of all parameters alike, so no operations of one
    size, scale, keep, rest1, rest2 = (
        lr / (1 - beta1),
        (1 - beta2) ** -0.5,
        1 - lr * decay,
        1 - beta1,
        1 - beta2,
    )
    size, eps = size / scale, eps / scale
    p, g, m, v = Counted(start), Counted(gradient), Counted(0), Counted(0)
    Counted.count = 0
    m = m * beta1 + g * rest1
    v = v * beta2 + g * g * rest2
    p = p * keep - m / (v.sqrt() + eps) * size
    assert Counted.count == ADAMW_FLOPS
    assert float(p) == pytest.approx(parameter.item(), rel=1e-12)


def test_adamw_moves_what_it_needs_and_what_it_changes() -> None:
    parameter = torch.nn.Parameter(torch.full((64,), 0.5))
    optimizer = make_optimizer(OptimizerKind.FUSED, [parameter])
    for _ in range(2):
        parameter.grad = torch.full((64,), 0.25)
        state = optimizer.state[parameter]
        tensors = [
            parameter,
            parameter.grad,
            *(state[name] for name in ("exp_avg", "exp_avg_sq") if name in state),
        ]
        before = [tensor.detach().clone() for tensor in tensors]
        optimizer.step()
    assert len(tensors) == 4
    changed = [
        tensor for tensor, was in zip(tensors, before, strict=True) if not torch.equal(tensor, was)
    ]
    moved = sum(tensor.nbytes for tensor in [*tensors, *changed])
    assert moved == ADAMW_BYTES * parameter.numel()


def test_below_the_ridge_memory_sets_the_time_and_above_it_arithmetic() -> None:
    device = find_device("H200")
    ridge = 989.5 / 4.8
    for intensity in (0, ridge / 7, ridge, ridge * 7):
        work = PartWork(
            name="", flops=round(intensity * 10**12), moved_bytes=10**12, precision=Precision.BF16
        )
        by_memory, by_arithmetic = 1e12 / 4.8e12, intensity * 1e12 / 989.5e12
        expected = by_memory if intensity <= ridge else by_arithmetic
        assert least_time_s(work, device) == pytest.approx(expected)
    assert least_time_s(optimizer_work(run_config(SIZES["tiny"])), find_device("B200")) is None


@pytest.mark.parametrize("attention", Attention)
def test_grouped_queries_and_micro_batches_are_as_torch_counts_them(attention) -> None:
    shape = replace(GROUPED, attention=attention)
    config = run_config(shape, batch_size=3, accumulate_steps=2)
    model = TransformerLM(shape)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert count_parameters(shape) == parameters
    with FlopCounterMode(display=False) as counter, attention_backend(SdpaBackend.MATH):
        for _ in range(2):
            model(torch.zeros(3, shape.context_length, dtype=torch.int64)).sum().backward()
    assert step_flops(config) == counter.get_total_flops()
