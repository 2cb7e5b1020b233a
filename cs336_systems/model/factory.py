"""Makes the model that a configuration names: this project's, or a user's own by its factory."""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from cs336_systems import find_modules_of_the_user
from cs336_systems.config import ModelConfig, RunConfig
from cs336_systems.model.transformer import TransformerLM


def make_model(config: RunConfig) -> nn.Module:
    """The model of the configuration, made and initialised on its device."""
    with torch.device(config.device.value):
        if config.model_factory is None:
            return TransformerLM(config.model)
        return call_factory(load_factory(config.model_factory), config.model).to(config.device.value)


def load_factory(name: str) -> Callable[..., nn.Module]:
    """The factory that --model names; raise ValueError where it is not there."""
    return load_callable(name, "--model", "a callable that makes a model")


def load_callable(name: str, flag: str, needed: str) -> Callable[..., Any]:
    """Import `package.module:name`, looking in the current directory too; raise ValueError where it is not there.

    Messages name the flag, and say what was needed.
    """
    module_name, _, attribute = name.partition(":")
    find_modules_of_the_user()
    try:
        found: object = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{flag} {name}: {error}") from error
    if not callable(found):
        raise ValueError(f"{flag} {name}: needed {needed}, got {type(found).__name__}")
    return found


def call_factory(factory: Callable[..., nn.Module], model: ModelConfig) -> nn.Module:
    """Call the factory with the fields of `model` that its signature names."""
    known = {field.name: getattr(model, field.name) for field in fields(model)}
    parameters = inspect.signature(factory).parameters.values()
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    missing = [p.name for p in required if p.name not in known]
    if missing:
        raise ValueError(f"the model factory needs {', '.join(missing)}; it can have: {', '.join(known)}")
    made = factory(**{p.name: known[p.name] for p in parameters if p.name in known})
    if not isinstance(made, nn.Module):
        raise ValueError(f"the model factory must return a torch.nn.Module, got {type(made).__name__}")
    return made
