"""Makes the causal language model that a configuration file describes, by transformers.

Weights are random. Nothing is downloaded, and no code that lies beside the file is run.
"""

import gc
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import nn

from ..config import Attention
from ..model_file import path_of_model, read_model_file
from ..text import print_aside

IMPLEMENTATIONS = {Attention.NAIVE: "eager", Attention.SDPA: None}
"""transformers' names of the ways to compute attention; None lets it choose sdpa wherever the model
has that, and else it computes eagerly.
"""

SIZE = re.compile(
    r"(^|_)(vocab_size|hidden_size|intermediate_size|d_model|dim|embd|(hidden|num|n)_layers?|heads?|"
    r"experts|per_tok|rank)$"
)
"""Names of the settings of a configuration that are sizes of matrices or numbers of blocks."""


@contextmanager
def _without_collections() -> Iterator[None]:
    """While open, no garbage is collected, and later collections leave out what was made before:
    imports make a million objects and next to no garbage, and collections take a fifth of the time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()


@_without_collections()
def factory_of_file(name: str) -> Callable[..., nn.Module]:
    """The factory of the model that `hf:PATH` names; raise ValueError for a file that describes
    no causal language model of transformers, or none of its sizes.

    Imports the model's code, which takes seconds.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    config = _configuration(name)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"--model {name}: transformers has no causal language model of model_type "
            f"{config.model_type!r}"
        )
    # imported now, as imports within a trace are slow
    _check_architecture(name, MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__)
    _check_sizes(name, config)
    config.use_cache = False  # of keys and values, for generating

    def make(context_length: int, attention: Attention) -> nn.Module:
        """Make the model with random weights in fp32, whatever type the file names for them;
        raise ValueError for a context that it has no positions for.
        """
        _check_context(name, config, context_length)
        model: nn.Module = AutoModelForCausalLM.from_config(
            config,
            dtype=torch.float32,
            attn_implementation=IMPLEMENTATIONS[attention],
            trust_remote_code=False,
        )
        if attention is Attention.SDPA and config._attn_implementation != "sdpa":
            _say_once(
                f"--model {name}: transformers has no fused attention for {config.model_type}, so "
                "attention is that of --attention naive"
            )
        return model

    return make


def _check_context(name: str, config: Any, context_length: int) -> None:  # noqa: ANN401
    """Raise ValueError for a context that the model has no positions for."""
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None) or context_length
    if context_length > longest:
        raise ValueError(
            f"--model {name}: the context of {context_length} is longer than the {longest} "
            "positions of the model (max_position_embeddings): ask for a shorter one, or "
            "change the file"
        )


def _check_architecture(name: str, made: str) -> None:
    """Raise ValueError if the file names another model of its kind than the one that is `made`, the
    causal language model: an encoder with a decoder, one without a causal mask, a classifier.
    """
    named = read_model_file(name).get("architectures") or []
    # files of other programs write names in capitals of their own, such as LLaMAForCausalLM
    if named and made.casefold() not in [str(other).casefold() for other in named]:
        raise ValueError(
            f"--model {name}: the file describes {', '.join(map(str, named))}, and only causal "
            f"language models are made from files: write {made} under `architectures` if that is "
            "what you mean, or use your own --model package.module:factory"
        )


def _check_sizes(name: str, config: Any) -> None:  # noqa: ANN401 (a class of transformers)
    """Say which sizes of the model are not in its file, but transformers' own; raise ValueError if
    all are. Files of transformers have all of them, but for those of a model within another, of
    which they leave out what does not differ.
    """
    values = read_model_file(name)
    text = values.get("text_config", values)
    model = config.get_text_config()
    names = {real: other for other, real in model.attribute_map.items()} | model.attribute_map
    usual, said = {}, 0
    for key, parameter in signature(type(model)).parameters.items():
        if type(parameter.default) is not int or not SIZE.search(key):
            continue
        if key in text or names.get(key) in text:
            said += 1
        else:
            usual[key] = parameter.default
    sizes = ", ".join(f"`{key}` {value:,}" for key, value in usual.items())
    if usual and not said:
        raise ValueError(
            f"--model {name}: needed the model's sizes, and the file has none, for which "
            f"transformers would take its own ({sizes}): write those that you mean"
        )
    if usual:
        _say_once(
            f"--model {name}: sizes that the file does not have are transformers' own: {sizes}"
        )


@cache
def _say_once(message: str) -> None:
    """Tell the user, once in a process."""
    print_aside(message)


def _configuration(name: str) -> Any:  # noqa: ANN401 (a class of transformers)
    """The file as transformers reads it; raise ValueError for a kind of model that it has not."""
    from transformers import CONFIG_MAPPING, AutoConfig, __version__

    model_type = read_model_file(name)["model_type"]
    if model_type not in CONFIG_MAPPING:
        raise ValueError(
            f"--model {name}: transformers {__version__} has no model_type {model_type!r}, and "
            "code beside a configuration file is never run: use a newer transformers, or your "
            "own --model package.module:factory"
        )
    return AutoConfig.from_pretrained(
        path_of_model(name), trust_remote_code=False, local_files_only=True
    )
