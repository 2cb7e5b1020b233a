"""Random values of a new model's parameters. Gains of norms are already 1 and their biases 0."""

import math

from torch import nn

from cs336_systems.config import Arch, ModelConfig


def initialise(model: nn.Module, config: ModelConfig) -> None:
    """Draw the parameters of the whole model, as its architecture was published."""
    if config.arch is Arch.GPT2:
        _initialise_gpt2(model, config.num_layers)
    else:
        _initialise_cs336(model)


def _initialise_cs336(model: nn.Module) -> None:
    """The course's: normal with variance 2 / (d_in + d_out), 1 for embeddings, cut at 3 standard deviations."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            std = 1.0 if name == "token_embeddings.weight" else math.sqrt(2 / sum(parameter.shape))
            nn.init.trunc_normal_(parameter, std=std, a=-3 * std, b=3 * std)


def _initialise_gpt2(model: nn.Module, num_layers: int) -> None:
    """GPT-2's: normal with standard deviation 0.02, over sqrt(2 num_layers) in layers that add to the residual stream.

    Biases are 0.
    """
    for name, parameter in model.named_parameters():
        if name.endswith(("output_proj.weight", "ffn.w2.weight")):
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * num_layers))
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02)
