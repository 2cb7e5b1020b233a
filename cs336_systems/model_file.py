"""A model named by its configuration file, as transformers and the Hub write it: `hf:PATH`.

The file is data. It is read without torch and without transformers, and no code beside it is run.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

PREFIX = "hf:"
"""Begins the name of a model that a configuration file describes; the file's path follows."""
USUAL_NAME = "config.json"
PARAMETERS = frozenset({"context_length", "attention"})
"""Settings of a run's model that such a model obeys; the file decides all others."""
_LENGTHS = ("max_position_embeddings", "n_positions")
"""Keys of the longest sequence; GPT-2 and its relatives have the second."""


def is_model_file(name: str | None) -> bool:
    """Whether --model names a configuration file, and not a factory."""
    return name is not None and name.startswith(PREFIX) and len(name) > len(PREFIX)


def path_of_model(name: str) -> Path:
    """The configuration file that `hf:PATH` names; PATH may be its directory."""
    path = Path(name.removeprefix(PREFIX))
    return path / USUAL_NAME if path.is_dir() else path


def read_model_file(name: str) -> dict[str, Any]:
    """What the configuration file says; raise ValueError unless it describes a model of
    transformers, by a `model_type`, and transformers is installed.
    """
    path = path_of_model(name)
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(
            f"--model {PREFIX} needs a configuration file ({USUAL_NAME}), or its directory, and "
            f"{str(path)!r} cannot be read: {error.strerror}"
        ) from error
    except ValueError as error:
        raise ValueError(f"--model {name}: needed a JSON file, got other text: {error}") from error
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise ValueError(
            f"--model {name}: needed an object with a `model_type`, as save_pretrained of "
            "transformers writes it, and this one has none"
        )
    if importlib.util.find_spec("transformers") is None:
        raise ValueError(
            f"--model {name} needs transformers, which makes the model and is not installed: "
            "`pip install transformers`"
        )
    return values


def heads_of_keys(name: str | None) -> int:
    """The heads of keys and values of the model, by its file; 0 where it does not say, and of a
    model that is no file's.
    """
    if name is None or not is_model_file(name):
        return 0
    values = read_model_file(name)
    heads = values.get("text_config", values).get("num_key_value_heads")
    return heads if isinstance(heads, int) else 0


def longest_context(name: str) -> int | None:
    """The most tokens of a sequence of the model, by its file; None where the file leaves that
    to transformers.
    """
    values = read_model_file(name)
    text = values.get("text_config", values)  # of a model that takes images too
    lengths = [text[key] for key in _LENGTHS if isinstance(text.get(key), int)]
    return min(lengths, default=None)
