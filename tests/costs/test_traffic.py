"""The closed forms of what a step moves, against a count of the operands of every operation that PyTorch dispatches."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cs336_systems.config import (
    SIZES,
    Arch,
    Attention,
    Mode,
    ModelConfig,
    OptimizerKind,
    Precision,
    RunConfig,
)
from cs336_systems.costs.accounting import count_parameters, forward_work
from cs336_systems.costs.traffic import OPTIMIZER_BYTES, linear_weights, traffic
from cs336_systems.measure.clock import make_clock
from cs336_systems.measure.step import TrainingStep
from cs336_systems.model.transformer import TransformerLM

BATCH, SEQ = 3, 5
SHAPE = ModelConfig(vocab_size=29, context_length=SEQ, d_model=16, d_ff=24, num_layers=2, num_heads=2)
OF_OTHERS = {1, BATCH, SEQ, BATCH * SEQ, BATCH * SHAPE.num_heads}
"""Sizes that no axis of a weight has: a matrix with one of them is an activation, GPT-2's table of positions, or the
gradient of a bias before it loses its axis of 1."""
LOOKUPS = ("aten.embedding.default",)
"""Reads rows of the table, not the table."""
CASTS = ("aten._to_copy.default",)


def is_weight(tensor):
    return tensor.dim() == 2 and not OF_OTHERS & set(tensor.shape)


class Count(TorchDispatchMode):
    """Bytes of the weights, and of tensors of their shape, that each operation reads and writes, by its name."""

    def __init__(self):
        super().__init__()
        self.moved = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        schema = function._schema.arguments
        given = dict(zip((argument.name for argument in schema), args, strict=False)) | (kwargs or {})
        read = self._weights(given)
        changed = [argument.name for argument in schema if argument.alias_info and argument.alias_info.is_write]
        # the gradients are declared as changed, which they are only with a loss scale
        written = self._weights({name: given[name] for name in changed if name in given and name != "grads"})
        fresh = {place: tensor for place, tensor in self._weights(results).items() if place not in read}
        if str(function) not in LOOKUPS and (written or not self._is_view(given, results)):
            self.moved[str(function)] += self._bytes(read) + self._bytes(fresh) + self._bytes(written)
        return results

    def _weights(self, values):
        return {leaf.data_ptr(): leaf for leaf in tree_leaves(values) if torch.is_tensor(leaf) and is_weight(leaf)}

    def _is_view(self, given, results):
        places = {leaf.data_ptr() for leaf in tree_leaves(given) if torch.is_tensor(leaf)}
        return all(leaf.data_ptr() in places for leaf in tree_leaves(results) if torch.is_tensor(leaf))

    def _bytes(self, weights):
        return sum(tensor.nbytes for tensor in weights.values())


def counted(config):
    """Bytes moved by operation of forward and backward, then of the optimizer, in the second step."""
    step, clock = TrainingStep(config), make_clock(config)
    step(clock)
    batch = step.batches()
    with Count() as products:
        step.backward(step.forward(batch))
    with Count() as update:
        step.update()
    return products.moved, update.moved


def make(arch=Arch.CS336, **changes):
    return RunConfig(size="custom", model=replace(SHAPE, arch=arch), batch_size=BATCH, **changes)


BF16 = {"precision": Precision.BF16}


@pytest.mark.parametrize("changes", [{}, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("arch", Arch)
def test_weights_and_casts_are_those_that_are_dispatched(arch, changes):
    config = make(arch, **changes)
    moved, _ = counted(config)
    found = traffic(config)
    assert sum(moved[name] for name in CASTS) == found.casts
    assert sum(moved.values()) == found.weights + found.casts


@pytest.mark.parametrize("arch", Arch)
def test_weights_cast_once_are_cast_no_more(arch):
    config = make(arch, **BF16, cast_once=True, optimizer=OptimizerKind.FUSED)
    moved, _ = counted(config)
    found = traffic(config)
    assert found.casts == 0
    # gradients of weights that share a product are parts of one tensor: slices of it are not what is written
    assert sum(moved[name] for name in moved if "slice" not in name) == found.weights


@pytest.mark.parametrize("kind", OptimizerKind)
def test_an_optimizer_moves_so_many_bytes_for_each_parameter(kind):
    config = make(optimizer=kind)
    matrices = sum(p.numel() for p in TransformerLM(config.model).parameters() if p.dim() == 2)
    _, moved = counted(config)
    assert sum(moved.values()) == OPTIMIZER_BYTES[kind] * matrices
    assert traffic(config).optimizer == OPTIMIZER_BYTES[kind] * count_parameters(config.model)


@pytest.mark.parametrize("split_masters", [False, True])
@pytest.mark.parametrize("arch", Arch)
def test_one_pass_over_masters_moments_gradients_and_copies(arch, split_masters):
    """Of the tensors that the optimizer really holds: each read once, all but the gradients written once.

    A copy is read only if it is a part of a split master.
    """
    config = make(arch, **BF16, cast_once=True, split_masters=split_masters, optimizer=OptimizerKind.FUSED)
    step, clock = TrainingStep(config), make_clock(config)
    step(clock)
    step.backward(step.forward(step.batches()))
    moved = 0
    for weight in step.optimizer._weights:
        state = [weight.master, *(value for value in step.optimizer.state[weight.master].values() if value.dim())]
        state += [] if weight.remainder is None else [weight.remainder, weight.copy.values]
        moved += 2 * sum(tensor.nbytes for tensor in state) + sum(gradient.nbytes for gradient in weight.gradients())
        moved += 0 if weight.copy is None or weight.remainder is not None else weight.copy.values.nbytes
    assert moved == traffic(config).optimizer


@pytest.mark.parametrize("arch", Arch)
def test_linear_weights_are_those_of_the_linear_layers(arch):
    model = TransformerLM(replace(SHAPE, arch=arch))
    matrices = [m.weight.numel() for m in model.modules() if type(m).__name__ in ("Linear", "LMHead")]
    assert linear_weights(model.config) == sum(matrices)


@pytest.mark.parametrize("attention", Attention)
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_activations_of_the_products_by_hand(precision, attention):
    """In, q, k, v; context in, out; x, w1, w3, hidden, w2; x, logits; q, k, scores; weights, v, values."""
    model = replace(SHAPE, attention=attention)
    stream, hidden = BATCH * SEQ * 16, BATCH * SEQ * 24
    scores = BATCH * 2 * SEQ * SEQ if attention is Attention.NAIVE else 0
    layer = 4 * stream + 2 * stream + (stream + 3 * hidden + stream) + 2 * (2 * stream + scores)
    elements = 2 * layer + stream + BATCH * SEQ * 29
    size = 4 if precision is Precision.FP32 else 2
    config = RunConfig(size="custom", model=model, batch_size=BATCH, precision=precision)
    assert traffic(config).activations == 3 * size * elements


def test_activations_grow_with_the_batch_and_the_state_does_not():
    one, two = (traffic(replace(make(), batch_size=batch)) for batch in (1, 2))
    assert two.activations == 2 * one.activations
    assert two.state == one.state


def test_what_is_not_known_is_none():
    assert traffic(make(model_factory="a:b")) is None
    assert traffic(make(mode=Mode.FORWARD_BACKWARD)) is None
    known = RunConfig(
        size="small", model=SIZES["small"], precision=Precision.BF16, optimizer=OptimizerKind.FUSED, cast_once=True
    )
    assert traffic(known) is not None
    assert traffic(replace(known, fp8=True)) is None


def test_fused_adamw_of_the_small_model_takes_what_the_project_says_it_takes():
    """PERFORMANCE: at 4.3 TB/s AdamW's 28 bytes a parameter take 0.8 ms for small (129e6 parameters), 20 for 2.7B."""
    for size, least_ms in (("small", 0.8), ("2.7B", 22)):
        config = RunConfig(size=size, model=SIZES[size], optimizer=OptimizerKind.FUSED)
        assert traffic(config).optimizer / 4.3e12 * 1e3 == pytest.approx(least_ms, rel=0.1)


def test_the_products_are_those_of_the_accounting():
    config = make()
    forward = sum(work.moved_bytes for work in forward_work(config) if work.name != "embedding")
    table = 4 * SHAPE.vocab_size * SHAPE.d_model
    found = traffic(config)
    assert found.activations + found.weights - table == 3 * forward
