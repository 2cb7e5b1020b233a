"""The parameters of this project's model: their names on tapes, and their shapes as products of named axes."""

from math import prod

from cs336_systems.config import Arch, ModelConfig, RunConfig
from cs336_systems.costs.allocator import round_up

WEIGHTS = {
    "q": "d_model d_model",
    "k": "d_model d_model",
    "v": "d_model d_model",
    "output": "d_model d_model",
    "w1": "d_ff d_model",
    "w2": "d_model d_ff",
    "w3": "d_ff d_model",
    "lm_head": "vocabulary d_model",
}
"""Shapes of the linear layers' weights, (d_out, d_in)."""


def axes(config: RunConfig) -> dict[str, int]:
    """Sizes of the axes that occur in formulas."""
    model = config.model
    return {
        "batch": config.batch_size,
        "T": model.context_length,
        "d_model": model.d_model,
        "d_ff": model.d_ff,
        "heads": model.num_heads,
        "d_head": model.d_head,
        "vocabulary": model.vocab_size,
        "T128": round_up(model.context_length, 128),
        "d_head32": round_up(model.d_head, 32),
    }


def parameter_shapes(model: ModelConfig) -> dict[str, str]:
    """Shape of every parameter by its name, in the order in which the model makes and the optimizer updates them.

    A parameter of a block begins with the block's index. The head of gpt2 is the embedding.
    """
    gpt2 = model.arch is Arch.GPT2
    shapes = {"embedding": WEIGHTS["lm_head"]}
    if gpt2:
        shapes["positions"] = "T d_model"

    def add(name: str, shape: str) -> None:
        shapes[name] = shape
        if gpt2:
            shapes[f"{name}.bias"] = shape.split()[0]

    for index in range(model.num_layers):
        for norm, linear in (("ln1", ("q", "k", "v", "output")), ("ln2", ("w1", "w2") if gpt2 else ("w1", "w2", "w3"))):
            add(f"{index}.{norm}", "d_model")
            for name in linear:
                add(f"{index}.{name}", WEIGHTS[name])
    add("ln_final", "d_model")
    if not gpt2:
        shapes["lm_head"] = WEIGHTS["lm_head"]
    return shapes


def elements(shape: str, sizes: dict[str, int]) -> int:
    """Number of elements of a shape."""
    return prod(sizes[name] for name in shape.split())
