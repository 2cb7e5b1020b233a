"""Steps of models whose parameters are all drawn, biases among them, which begin at 0 otherwise."""

import math

import torch

from cs336.config import Attention, ModelConfig, OptimizerKind, Precision, RunConfig
from cs336.measure.step import TrainingStep
from cs336.model.transformer import TransformerLM
from tests.rounding import of_walk

MODEL = ModelConfig(
    vocab_size=37,
    context_length=16,
    d_model=128,
    d_ff=64,
    num_layers=3,
    num_heads=2,
    attention=Attention.SDPA,
)
COPIED = RunConfig(
    size="custom",
    model=MODEL,
    batch_size=3,
    precision=Precision.BF16,
    optimizer=OptimizerKind.FUSED,
    cast_once=True,
    learning_rate=2e-4,
)
DRAWN = 0.08
"""Standard deviation of the parameters."""
EPS = 1e-2
"""AdamW's, as large as gradients: beside a smaller one rounding decides the sign of updates by
gradients near zero.
"""

OF_AN_UPDATE = 16
"""Roundings in fp32 from gradients to a master: of their mean, both moments, the quotient, the
decay and the sum.
"""


def roundings(model):
    """Roundings to low precision on the longest way forward and backward through the model.

    Those of a block are of two norms, of three projections and two matmuls around softmax in
    attention, and of two projections and an activation in its feed-forward network; outside of
    blocks are those of a norm and of the logits.
    """
    return 2 * (9 * model.num_layers + 2)


def of_losses(config, dtype=torch.bfloat16):
    """Largest difference of the losses of two trainings that round differently; logits are of
    magnitude 1.

    The mean of the tokens' losses is one in fp32.
    """
    tokens = config.batch_size * config.model.context_length
    of_mean = of_walk(torch.float32, tokens) * math.log(config.model.vocab_size)
    return of_walk(dtype, 2 * roundings(config.model), tokens) + of_mean


def with_smooth_updates(step):
    """The step, whose optimizer has EPS."""
    assert step.optimizer is not None
    for group in step.optimizer.param_groups:
        group["eps"] = EPS
    return step


def drawn_step(config):
    """A step of the configuration; those of one model have the same parameters."""
    generator = torch.Generator().manual_seed(0)
    model = TransformerLM(config.model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_gain = "ln" in name and name.endswith("weight")
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * DRAWN + is_gain)
    return with_smooth_updates(TrainingStep(config, model.to(config.device.value)))


def loss_and_gradients(config):
    """A step after backward, with its loss and each weight's gradient in fp32 by name."""
    step = drawn_step(config)
    loss = step.forward(step.batches())
    step.backward(loss)
    return step, {"loss": loss.detach(), **gradients(step)}


def gradients(step):
    """The gradient of each weight, whether the model reads it itself or its copy."""
    return {
        weight.name: torch.stack([tensor.float() for tensor in weight.gradients()]).sum(0)
        for weight in step.model.weights
    }
