"""What a user wrote: a model, its loss, a way to share a step, an optimizer.

What each of them must be is checked here, so that an error names what was needed.
"""

import importlib
import inspect
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .. import find_modules_of_the_user
from ..config import ModelConfig
from ..costs.tape import TraceError
from ..model_file import is_model_file

BUCKET_SIZE = "bucket_size_mb"
"""Parameter of the course's data parallelism with buckets."""
Loss = Callable[[Tensor, Tensor], Tensor]
"""The mean loss of a batch, from its tokens and its targets."""
TARGETS = ("targets", "labels")
"""Parameters of `forward` by which models take what they are to predict: nanoGPT's, and that of
transformers.

`targets` are the next tokens; `labels` are the tokens themselves, which such a model shifts.
"""


def load_factory(name: str) -> Callable[..., nn.Module]:
    """The factory that --model names; raise ValueError where it is not there."""
    if is_model_file(name):
        from .from_file import factory_of_file

        return factory_of_file(name)
    return load_callable(name, "--model", "a callable that makes a model")


def load_callable(name: str, flag: str, needed: str) -> Callable[..., Any]:
    """Import `package.module:name`, looking in the current directory too; raise ValueError where it
    is not there.

    Messages name the flag, and say what was needed.
    """
    module_name, _, attribute = name.partition(":")
    find_modules_of_the_user()
    try:
        target: object = importlib.import_module(module_name)
        for part in attribute.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{flag} {name}: {error}") from error
    if not callable(target):
        raise ValueError(f"{flag} {name}: needed {needed}, got {type(target).__name__}")
    return target


def call_factory(
    factory: Callable[..., object], model: ModelConfig, **more: int
) -> nn.Module | Callable[[], object]:
    """Call the factory with the fields of `model`, and of `more`, that its signature names. It
    makes a model, or a function that is a whole training step.
    """
    known = {field.name: getattr(model, field.name) for field in fields(model)} | more
    if not model.num_kv_heads:  # the factory has its own default, or none
        del known["num_kv_heads"]
    parameters = inspect.signature(factory).parameters.values()
    missing = []
    for parameter in parameters:
        is_optional = parameter.default is not parameter.empty
        takes_any = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if not (is_optional or takes_any or parameter.name in known):
            missing.append(parameter.name)
    if missing:
        raise ValueError(
            f"the model factory needs {_quoted(missing)}, without a default; it can be given: "
            f"{_quoted(known)}"
        )
    names = {parameter.name for parameter in parameters}
    made = factory(**{name: value for name, value in known.items() if name in names})
    if not callable(made):
        raise _other_than_module(made)
    return made


def checked_module(made: object) -> nn.Module:
    """The model that a factory has made; raise ValueError for anything else."""
    if not isinstance(made, nn.Module):
        raise _other_than_module(made)
    return made


def _other_than_module(made: object) -> ValueError:
    return ValueError(f"the model factory must return a torch.nn.Module, got {type(made).__name__}")


def _quoted(names: Iterable[str]) -> str:
    """Names of parameters, quoted so that nobody takes them for flags."""
    return ", ".join(f"`{name}`" for name in names)


def own_way(name: str, module: nn.Module, bucket_mib: int) -> Any:  # noqa: ANN401
    """The module in the user's way to share a step; raise ValueError where that has not the
    course's interface.
    """
    make = load_callable(name, "--own-ddp", "a class that is made with a module")
    arguments: list[Any] = [module]
    if BUCKET_SIZE in inspect.signature(make).parameters:
        arguments.append(bucket_mib)
    way = make(*arguments)
    if not callable(way) or not hasattr(way, "finish_gradient_synchronization"):
        came = type(way).__name__
        raise ValueError(
            f"--own-ddp {name}: needed a module with finish_gradient_synchronization(), got {came}"
        )
    return way


def own_optimizer(
    name: str, parameters: Iterable[nn.Parameter], lr: float
) -> torch.optim.Optimizer:
    """The user's optimizer of these parameters, or sharded one, which is given the class of the
    optimizer.
    """
    make = load_callable(name, "--own-optimizer", "an optimizer")
    _, *others = inspect.signature(make).parameters.values()
    names = {parameter.name for parameter in others}
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in others)
    arguments: list[Any] = [parameters]
    if "optimizer_cls" in names:
        arguments.append(torch.optim.AdamW)
    settings = {"lr": lr} if "lr" in names or takes_any else {}
    optimizer = make(*arguments, **settings)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"--own-optimizer {name}: needed a torch.optim.Optimizer, got "
            f"{type(optimizer).__name__}"
        )
    return optimizer


def logits_of(output: object) -> Tensor | None:
    """The logits in what a model returned: itself, its `logits`, or the first element of a
    tuple; None without any.
    """
    logits: object = output
    if isinstance(output, Mapping):
        logits = output.get("logits")
    elif isinstance(output, tuple | list):
        logits = output[0] if output else None
    elif not isinstance(output, Tensor):
        logits = getattr(output, "logits", None)
    return logits if isinstance(logits, Tensor) else None


def check_logits(output: object, targets: Tensor, vocab_size: int | None) -> Tensor:
    """The logits in what a model returned; raise ValueError, with the lines that mend it, for
    anything else.

    They may have more entries than the vocabulary; the rest is padding.
    """
    logits = logits_of(output)
    if (
        logits is not None
        and logits.shape[:-1] == targets.shape
        and logits.shape[-1] >= (vocab_size or 1)
    ):
        return logits
    came = type(output).__name__ if logits is None else f"logits of shape {tuple(logits.shape)}"
    needed = ", ".join(map(str, (*targets.shape, vocab_size or "vocabulary")))
    raise ValueError(
        f"the model must return logits of shape ({needed}), an object or dict with `logits`, or a "
        f"tuple that begins with them, and it returned {came}; wrap it so that forward(tokens) "
        "returns them, or, if forward takes targets and returns a loss, use --loss model"
    )


def own_loss(model: nn.Module) -> Loss:
    """The loss that the model computes itself when it is given what to predict; raise ValueError if
    it cannot.

    The call raises ValueError where no loss (a tensor without axes) is in what the model returns.
    """
    names = inspect.signature(model.forward).parameters
    name = next((name for name in TARGETS if name in names), None)
    if name is None:
        raise ValueError(
            f"--loss model needs a model whose forward takes {' or '.join(TARGETS)}, got "
            f"forward({', '.join(names)})"
        )

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        """Call the model on `tokens` with targets, and find the loss in its output: a tensor
        without axes that is the output itself, its `loss` field or entry, or an element of a tuple
        or list.

        If the argument is not named "targets", it gets the tokens themselves, as models with
        `labels` shift them.
        """
        argument = targets if name == "targets" else tokens
        output = model(tokens, **{name: argument})
        candidates: list[Any] = [output, getattr(output, "loss", None)]
        if isinstance(output, Mapping):
            candidates.insert(0, output.get("loss"))
        elif isinstance(output, tuple | list):
            candidates = [*output]
        for part in candidates:
            if isinstance(part, Tensor) and part.ndim == 0:
                return part
        raise ValueError(
            "--loss model needs a loss (a tensor without axes, in a tuple or as `loss`) when "
            f"forward is given {name}, and it returned {type(output).__name__} without one"
        )

    return loss


def users_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost line of an exception's traceback that lies neither in PyTorch nor in this
    program, which is the line to show to the user; None if there is none.
    """
    others = [Path(torch.__file__).parent, Path(__file__).parents[1]]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if not frame.filename.startswith("<") and not any(map(path.is_relative_to, others)):
            return frame
    return None


def is_our_message(error: BaseException) -> bool:
    """Whether this program has raised the exception, with a message that says all."""
    frames = traceback.extract_tb(error.__traceback__)
    is_here = bool(frames) and Path(frames[-1].filename).is_relative_to(Path(__file__).parents[1])
    # where a trace runs operators, PyTorch's own exceptions come from lines of this program
    return isinstance(error, ValueError) and is_here and (frames[-1].line or "").startswith("raise")


def told(error: BaseException) -> str:
    """An exception of a user's code in one line: its type, its message, and the line that it
    comes from.
    """
    text = type(error).__name__
    lines = str(error).strip().splitlines()
    if lines:
        text += f": {lines[0]}"
    frame = users_frame(error)
    return text if frame is None else f"{text} ({Path(frame.filename).name}, line {frame.lineno})"


class _UsesOf(TorchFunctionMode):
    """Notes the exception of an operation that was given the tokens themselves.

    Looking tokens up in an embedding is what they are for: where that fails, they are not the
    cause.
    """

    def __init__(self, tokens: Tensor) -> None:
        """`tokens` is the tensor whose uses are watched."""
        super().__init__()
        self.failure: Exception | None = None
        self._tokens = tokens

    def __torch_function__(
        self,
        function: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: Any = (),  # noqa: ANN401
        kwargs: Any = None,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """Run the operation; if it raises and was given the tokens, and is no embedding, keep the
        exception.
        """
        try:
            return function(*args, **(kwargs or {}))
        except Exception as error:
            given = [*args, *(kwargs or {}).values()]
            has_tokens = any(value is self._tokens for value in given)
            if has_tokens and "embedding" not in str(function):
                self.failure = error
            raise


@contextmanager
def _noting_embeddings(model: nn.Module, tokens: Tensor) -> Iterator[list[int]]:
    """Context in which the sizes of the model's embeddings that are given the tokens themselves are
    added to the list that it yields.
    """
    entries: list[int] = []

    def note(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Forward pre-hook of an embedding: note its size."""
        # embeddings of anything else, such as positions, do not limit the vocabulary
        if isinstance(module, nn.Embedding) and inputs and inputs[0] is tokens:
            entries.append(module.num_embeddings)

    with ExitStack() as hooks:
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                hooks.callback(module.register_forward_pre_hook(note).remove)
        yield entries


def vocabulary_of(
    model: nn.Module, tokens: Tensor, precision: AbstractContextManager[None], asked: int | None
) -> int:
    """Size of the vocabulary to run the user's own model with: `asked`, or if that is None, the
    number of tokens that the model knows.

    A model knows as many tokens as its logits have entries in the last axis, or as its token
    embedding has, if those are fewer. To find them, the model runs once, without gradients, on
    `tokens`: a batch of the run's shape, all 0. Raise ValueError if the model does not take tokens,
    or knows fewer than asked for. What else the model raises is raised as it is.
    """
    needed = f"the model must take int64 tokens of shape {tuple(tokens.shape)}"
    try:
        inspect.signature(model.forward).bind(tokens)
    except TypeError as error:
        raise ValueError(
            f"{needed} and nothing else, and its forward takes no such call: {error}"
        ) from error
    uses = _UsesOf(tokens)
    try:
        with _noting_embeddings(model, tokens) as entries, torch.no_grad(), precision, uses:
            output = model(tokens)
    except (torch.OutOfMemoryError, TraceError):
        raise
    except Exception as error:
        if error is not uses.failure:
            raise
        raise ValueError(f"{needed}; given these it raised {told(error)}") from error
    logits = logits_of(output)
    if logits is None or logits.ndim < 3 or len(logits) != len(tokens):
        logits = check_logits(output, tokens, asked)  # raises the error that fits the output
    known = min([*entries, logits.shape[-1]])
    if asked is not None and asked > known:
        raise ValueError(
            f"--vocab-size {asked}: the model knows {known} tokens; ask for at most these"
        )
    return asked or known
