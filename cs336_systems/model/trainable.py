"""A model as a training step uses it, with its loss and its optimizer: this project's, or one that
a user wrote.

What a user's model, DDP and optimizer must be is checked here, so that an error names what was
needed.
"""

import functools
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from .. import find_modules_of_the_user
from ..config import CompileMode, LossKind, ModelConfig, RunConfig
from ..costs.tape import TraceError
from ..ranges import Range
from .annotate import annotate
from .optimizer import make_optimizer
from .transformer import TransformerLM

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
    return load_callable(name, "--model", "a callable that makes a model")


def load_callable(name: str, flag: str, needed: str) -> Callable[..., Any]:
    """Import `package.module:name`, looking in the current directory too; raise ValueError where it
    is not there.

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
    required = [
        p
        for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    missing = [p.name for p in required if p.name not in known]
    if missing:
        raise ValueError(
            f"the model factory needs {_quoted(missing)}, without a default; it can be given: "
            f"{_quoted(known)}"
        )
    made = factory(**{p.name: known[p.name] for p in parameters if p.name in known})
    if not isinstance(made, nn.Module):
        raise ValueError(
            f"the model factory must return a torch.nn.Module, got {type(made).__name__}"
        )
    return made


def _quoted(names: Iterable[str]) -> str:
    """Names of parameters, quoted so that nobody takes them for flags."""
    return ", ".join(f"`{name}`" for name in names)


def blocks_of(module: nn.Module) -> Iterator[nn.Module]:
    """The entries of the outermost ModuleLists in the module, such as the blocks of a
    Transformer.
    """
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from blocks_of(child)


def checkpoint_each_block(model: nn.Module) -> None:
    """Let each block save its inputs alone, and compute the rest again in backward; raise
    ValueError without blocks.
    """
    blocks = list(blocks_of(model))
    if not blocks:
        raise ValueError(
            "--checkpoint-blocks needs blocks in a torch.nn.ModuleList, and the model has none; "
            "leave the flag out"
        )
    for block in blocks:
        block.forward = functools.partial(_checkpointed, block.forward)


def _checkpointed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """Call a block under a checkpoint, and without the cache for generating: computed again, it
    would grow twice.
    """
    caches = sys.modules.get("transformers.cache_utils")
    if caches is not None:
        args = tuple(None if isinstance(value, caches.Cache) else value for value in args)
        kwargs = {
            name: None if isinstance(value, caches.Cache) else value
            for name, value in kwargs.items()
        }
    if "use_cache" in kwargs:
        kwargs["use_cache"] = False
    return checkpoint(forward, *args, **kwargs, use_reentrant=False)


def own_way(name: str, module: nn.Module, bucket_mib: int) -> Any:  # noqa: ANN401
    """The module in the user's way to share a step; raise ValueError where that has not the
    course's interface.
    """
    made = load_callable(name, "--own-ddp", "a class that is made with a module")
    way = (
        made(module, bucket_mib)
        if BUCKET_SIZE in inspect.signature(made).parameters
        else made(module)
    )
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
    made = load_callable(name, "--own-optimizer", "an optimizer")
    _, *others = inspect.signature(made).parameters.values()
    is_sharded = any(each.name == "optimizer_cls" for each in others)
    takes_lr = any(each.name == "lr" or each.kind is each.VAR_KEYWORD for each in others)
    optimizer = made(
        parameters, *([torch.optim.AdamW] if is_sharded else []), **({"lr": lr} if takes_lr else {})
    )
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
    found = output
    if isinstance(output, Mapping):
        found = output.get("logits")
    elif isinstance(output, tuple | list):
        found = output[0] if output else None
    elif not isinstance(output, Tensor):
        found = getattr(output, "logits", None)
    return found if isinstance(found, Tensor) else None


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
    name = next((each for each in TARGETS if each in names), None)
    if name is None:
        raise ValueError(
            f"--loss model needs a model whose forward takes {' or '.join(TARGETS)}, got "
            f"forward({', '.join(names)})"
        )

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        output = model(tokens, **{name: targets if name == "targets" else tokens})
        parts: list[Any] = [output.get("loss")] if isinstance(output, Mapping) else []
        parts += (
            [*output]
            if isinstance(output, tuple | list)
            else [output, getattr(output, "loss", None)]
        )
        for part in parts:
            if isinstance(part, Tensor) and part.ndim == 0:
                return part
        raise ValueError(
            "--loss model needs a loss (a tensor without axes, in a tuple or as `loss`) when "
            f"forward is given {name}, and it returned {type(output).__name__} without one"
        )

    return loss


def own_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost line of an exception that is neither PyTorch's nor this program's; None
    without one.
    """
    others = [Path(torch.__file__).parent, Path(__file__).parents[1]]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if not frame.filename.startswith("<") and not any(map(path.is_relative_to, others)):
            return frame
    return None


def is_own_message(error: BaseException) -> bool:
    """Whether this program has raised the exception, with a message that says all."""
    frames = traceback.extract_tb(error.__traceback__)
    is_here = bool(frames) and Path(frames[-1].filename).is_relative_to(Path(__file__).parents[1])
    # where a trace runs operators, PyTorch's own exceptions come from lines of this program
    return isinstance(error, ValueError) and is_here and (frames[-1].line or "").startswith("raise")


def told(error: BaseException) -> str:
    """An exception of a user's code in one line: its type, its message, and the line that it
    comes from.
    """
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    frame = own_frame(error)
    return text if frame is None else f"{text} ({Path(frame.filename).name}, line {frame.lineno})"


class _UsesOf(TorchFunctionMode):
    """Notes the exception of an operation that was given the tokens themselves.

    Looking tokens up in an embedding is what they are for: where that fails, they are not the
    cause.
    """

    def __init__(self, tokens: Tensor) -> None:
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
        try:
            return function(*args, **(kwargs or {}))
        except Exception as error:
            given = [*args, *(kwargs or {}).values()]
            if any(value is self._tokens for value in given) and "embedding" not in str(function):
                self.failure = error
            raise


def vocabulary_of(
    model: nn.Module, tokens: Tensor, precision: AbstractContextManager[None], asked: int | None
) -> int:
    """Tokens that the model knows: the last axis of its logits, or the entries of its token
    embedding if fewer.

    The model runs once, without gradients, on `tokens` (all 0), which show the form of a batch.
    `asked` is the vocabulary that the user wants. Raise ValueError if the model does not take
    tokens, or knows fewer than asked for. What else the model raises is raised as it is.
    """
    entries: list[int] = []

    def note(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if isinstance(module, nn.Embedding) and inputs and inputs[0] is tokens:
            entries.append(module.num_embeddings)

    needed = f"the model must take int64 tokens of shape {tuple(tokens.shape)}"
    try:
        inspect.signature(model.forward).bind(tokens)
    except TypeError as error:
        raise ValueError(
            f"{needed} and nothing else, and its forward takes no such call: {error}"
        ) from error
    handles = [
        each.register_forward_pre_hook(note)
        for each in model.modules()
        if isinstance(each, nn.Embedding)
    ]
    uses = _UsesOf(tokens)
    try:
        with torch.no_grad(), precision, uses:
            output = model(tokens)
    except (torch.OutOfMemoryError, TraceError):
        raise
    except Exception as error:
        if error is not uses.failure:
            raise
        raise ValueError(f"{needed}; given these it raised {told(error)}") from error
    finally:
        for handle in handles:
            handle.remove()
    logits = logits_of(output)
    if logits is None or logits.ndim == 0:
        logits = check_logits(output, tokens, asked)  # which raises
    found = min([*entries, logits.shape[-1]])
    if asked is not None and asked > found:
        raise ValueError(
            f"--vocab-size {asked}: the model knows {found} tokens; ask for at most these"
        )
    return asked or found


Criterion = Callable[[Tensor, Tensor, int], Tensor]
"""The mean loss, from logits, targets and the size of the vocabulary; logits beyond that size
are padding.
"""


class Trainable:
    """A model, unchanged, with PyTorch's cross-entropy; `FastTrainable` in `model/fast` computes
    faster.
    """

    def __init__(self, model: nn.Module, config: RunConfig) -> None:
        self.model, self.config = model, config
        if config.checkpoint_blocks and config.model_factory is not None:
            checkpoint_each_block(model)
        self.criterion: Criterion = cross_entropy
        self.loss = self._compiled(own_loss(model) if config.loss is LossKind.MODEL else self._loss)
        """Mean cross-entropy of a batch, compiled as the configuration says."""

    # no shapes are declared below, because the compiler cannot trace the checks of them that tests
    # install
    def _loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        vocab_size = self.config.model.vocab_size
        logits = check_logits(self.model(tokens), targets, vocab_size)
        with annotate(Range.LOSS):
            return self.criterion(logits, targets, vocab_size)

    def _compiled(self, loss: Loss) -> Loss:
        mode = self.config.compile
        return (
            loss
            if mode is CompileMode.NONE
            else cast("Loss", torch.compile(loss, mode=mode_of(mode)))
        )

    def make_optimizer(self) -> torch.optim.Optimizer:
        """The configuration's optimizer, for all parameters."""
        config = self.config
        if config.own_optimizer is not None:
            return own_optimizer(
                config.own_optimizer, self.model.parameters(), config.learning_rate
            )
        return make_optimizer(
            config.optimizer,
            self.model.parameters(),
            lr=config.learning_rate,
            capturable=config.cuda_graph,
        )


def mode_of(mode: CompileMode) -> str | None:
    """The mode as torch.compile has it."""
    return None if mode is CompileMode.DEFAULT else mode.value


def cross_entropy(logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Mean over all targets; logits from `vocab_size` on are left out."""
    if logits.shape[-1] > vocab_size:
        logits = logits[..., :vocab_size]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_model(config: RunConfig) -> nn.Module:
    """The model of the configuration, made and initialised on its device."""
    with torch.device(config.device.value):
        if config.model_factory is None:
            return TransformerLM(config.model)
        return call_factory(load_factory(config.model_factory), config.model).to(
            config.device.value
        )
