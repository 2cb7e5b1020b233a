"""What a step needs of a model that this project did not write: its logits or its own loss, and its vocabulary."""

import inspect
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Loss = Callable[[Tensor, Tensor], Tensor]
"""The mean loss of a batch, from its tokens and its targets."""
TARGETS = ("targets", "labels")
"""Parameters of `forward` by which models take what they are to predict: nanoGPT's, and that of transformers.

`targets` are the next tokens; `labels` are the tokens themselves, which such a model shifts.
"""


def logits_of(output: object) -> Tensor | None:
    """The logits in what a model returned: itself, its `logits`, or the first element of a tuple; None without any."""
    found = output
    if isinstance(output, Mapping):
        found = output.get("logits")
    elif isinstance(output, tuple | list):
        found = output[0] if output else None
    elif not isinstance(output, Tensor):
        found = getattr(output, "logits", None)
    return found if isinstance(found, Tensor) else None


def check_logits(output: object, targets: Tensor, vocab_size: int | None) -> Tensor:
    """The logits in what a model returned; raise ValueError, with the lines that mend it, for anything else.

    They may have more entries than the vocabulary; the rest is padding.
    """
    logits = logits_of(output)
    if logits is not None and logits.shape[:-1] == targets.shape and logits.shape[-1] >= (vocab_size or 1):
        return logits
    came = type(output).__name__ if logits is None else f"logits of shape {tuple(logits.shape)}"
    needed = ", ".join(map(str, (*targets.shape, vocab_size or "vocabulary")))
    raise ValueError(
        f"the model must return logits of shape ({needed}), an object or dict with `logits`, or a tuple that begins "
        f"with them, and it returned {came}; wrap it so that forward(tokens) returns them, or, if forward takes "
        "targets and returns a loss, use --loss model"
    )


def own_loss(model: nn.Module) -> Loss:
    """The loss that the model computes itself when it is given what to predict; raise ValueError if it cannot.

    The call raises ValueError where no loss (a tensor without axes) is in what the model returns.
    """
    names = inspect.signature(model.forward).parameters
    name = next((each for each in TARGETS if each in names), None)
    if name is None:
        raise ValueError(
            f"--loss model needs a model whose forward takes {' or '.join(TARGETS)}, got forward({', '.join(names)})"
        )

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        output = model(tokens, **{name: targets if name == "targets" else tokens})
        parts: list[Any] = [output.get("loss")] if isinstance(output, Mapping) else []
        parts += [*output] if isinstance(output, tuple | list) else [output, getattr(output, "loss", None)]
        for part in parts:
            if isinstance(part, Tensor) and part.ndim == 0:
                return part
        raise ValueError(
            f"--loss model needs a loss (a tensor without axes, in a tuple or as `loss`) when forward is given {name}, "
            f"and it returned {type(output).__name__} without one"
        )

    return loss


def vocabulary_of(model: nn.Module, tokens: Tensor, precision: AbstractContextManager[None], asked: int | None) -> int:
    """Tokens that the model knows: the last axis of its logits, or the entries of its token embedding if fewer.

    The model runs once, without gradients, on `tokens` (all 0), which show the form of a batch. `asked` is the
    vocabulary that the user wants. Raise ValueError if the model does not take tokens, or knows fewer than asked for.
    """
    entries: list[int] = []

    def note(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if isinstance(module, nn.Embedding) and inputs and inputs[0] is tokens:
            entries.append(module.num_embeddings)

    handles = [each.register_forward_pre_hook(note) for each in model.modules() if isinstance(each, nn.Embedding)]
    try:
        with torch.no_grad(), precision:
            output = model(tokens)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        place = next((each for each in reversed(frames) if "site-packages" not in each.filename), frames[-1])
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"the model must take int64 tokens of shape {tuple(tokens.shape)}; given these it raised "
            f"{type(error).__name__}: {reason} ({Path(place.filename).name}, line {place.lineno})"
        ) from None
    finally:
        for handle in handles:
            handle.remove()
    if (logits := logits_of(output)) is None:
        logits = check_logits(output, tokens, asked)  # which raises
    found = min([*entries, logits.shape[-1]])
    if asked is not None and asked > found:
        raise ValueError(f"--vocab-size {asked}: the model knows {found} tokens; ask for at most these")
    return asked or found
