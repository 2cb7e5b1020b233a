"""Steps of models whose parameters are all drawn, biases among them, which begin at 0 otherwise."""

import torch
from torch import Tensor

from cs336_systems.config import Attention, ModelConfig, OptimizerKind, Precision, RunConfig
from cs336_systems.measure.step import TrainingStep
from cs336_systems.model.transformer import TransformerLM

MODEL = ModelConfig(
    vocab_size=37, context_length=16, d_model=128, d_ff=64, num_layers=3, num_heads=2, attention=Attention.SDPA
)
COPIED = RunConfig(
    size="custom", model=MODEL, batch_size=3, precision=Precision.BF16, optimizer=OptimizerKind.FUSED, cast_once=True,
    learning_rate=2e-4,
)  # fmt: skip
DRAWN = 0.08
"""Standard deviation of the parameters."""


def drawn_step(config: RunConfig) -> TrainingStep:
    """A step of the configuration; those of one model have the same parameters."""
    generator = torch.Generator().manual_seed(0)
    model = TransformerLM(config.model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_gain = "ln" in name and name.endswith("weight")
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * DRAWN + is_gain)
    return TrainingStep(config, model.to(config.device.value))


def loss_and_gradients(config: RunConfig) -> tuple[TrainingStep, dict[str, Tensor]]:
    """A step after backward, with its loss and each weight's gradient in fp32 by name."""
    step = drawn_step(config)
    loss = step.forward(step.batches())
    step.backward(loss)
    return step, {"loss": loss.detach(), **gradients(step)}


def gradients(step: TrainingStep) -> dict[str, Tensor]:
    """The gradient of each weight, whether the model reads it itself or its copy."""
    names = (name for name, _ in step.model.named_parameters())
    weights = zip(names, step.model.weights, strict=True)  # type: ignore[call-overload]
    return {name: torch.stack([each.float() for each in weight.gradients()]).sum(0) for name, weight in weights}
