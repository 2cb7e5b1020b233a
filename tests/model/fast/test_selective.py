"""Selective checkpoints: the same gradients, less saved, and attention computed once."""

from dataclasses import replace

import pytest
import torch

from cs336.config import Arch
from cs336.costs.fast_memory import FastMemory
from tests.model.fast.steps import COPIED, MODEL, drawn_step, gradients
from tests.operators import Calls

BASE = replace(COPIED, fused_blocks=True, fused_loss=True)
SELECTIVE = replace(BASE, checkpoint_blocks=1, selective_checkpoints=True)


def backward(config):
    """The gradients of a step, the bytes of activations that forward saved, and the operators
    that backward called.
    """
    step = drawn_step(config)
    weights = step.model.weights
    known = {
        t.untyped_storage().data_ptr() for t in (*step.model.parameters(), *step.model.buffers())
    }
    known |= {w.copy.leaf.untyped_storage().data_ptr() for w in weights if w.copy is not None}
    saved = {}

    def keep(tensor):
        if (storage := tensor.untyped_storage()).data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = step.forward(step.batches())
    with Calls() as calls:
        step.backward(loss)
    return gradients(step), sum(saved.values()), calls.counts


@pytest.mark.parametrize("kept", [0, 2])
@pytest.mark.parametrize("arch", Arch)
def test_gradients_are_the_same_and_attention_is_computed_once(arch, kept):
    model = replace(MODEL, arch=arch)
    expected, _, plain = backward(replace(BASE, model=model))
    result, _, selective = backward(replace(SELECTIVE, model=model, keep_hidden=kept))
    for name, gradient in expected.items():
        assert torch.equal(result[name], gradient), name
    more = selective - plain
    assert not [name for name in selective if "attention" in name and "backward" not in name]
    # the output projection, and the first matmul of the feed-forward network; not that of q, k, v,
    # and not its last
    assert more["mm"] + more["addmm"] == 2 * MODEL.num_layers - kept
    assert more["add_norm"] == 2 * MODEL.num_layers


@pytest.mark.parametrize("changes", [{}, {"pad_vocabulary": 8}, {"batch_size": 2}], ids=str)
@pytest.mark.parametrize("arch", Arch)
def test_what_is_saved_is_forecast(arch, changes):
    for config in (
        BASE,
        SELECTIVE,
        replace(SELECTIVE, keep_hidden=2),
        replace(SELECTIVE, loss_chunks=4),
    ):
        config = replace(config, model=replace(MODEL, arch=arch), **changes)
        assert FastMemory(config).saved_bytes == backward(config)[1]
        if config.loss_chunks == 1:  # in fp8 its units are saved too, and biases are not cast
            in_fp8 = replace(config, fp8=True)
            assert FastMemory(in_fp8).saved_bytes == pytest.approx(backward(in_fp8)[1], rel=0.02)
