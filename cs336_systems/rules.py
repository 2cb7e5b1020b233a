"""Rules that several settings of a run share."""

from collections.abc import Callable
from typing import Any

from .choices import Attention, Device, Mode, OptimizerKind, Parallel, Precision
from .settings import Rule


def needs(needed: str, is_met: Callable[[Any], bool], got: str, subject: str = "{flag}") -> Rule:
    """The rule that the setting needs what `is_met` tells of a run; `got` is what it has."""
    return Rule(is_met, f"{subject} needs {needed}, got {got}")


def not_with(
    other: str, is_used: Callable[[Any], bool], only: Callable[[Any], bool] = lambda _: True
) -> Rule:
    """A rule of the setting `parallel`: with several ranks the flag `other` does not work yet; it
    holds for the runs that `only` accepts.
    """
    return Rule(
        lambda run: not (only(run) and is_used(run)),
        f"{{flag}} {{config.parallel}} cannot be combined with {other} yet: leave out one of them",
    )


OUR_MODEL = needs(
    "this project's model",
    lambda run: run.model_factory is None,
    "--model {config.model_factory!r}",
)
OWN_MODEL = needs(
    "your own model, as in --model package.module:factory",
    lambda run: run.model_factory is not None,
    "none",
)
NOT_OF_A_MODULE = "{flag} must be package.module:Class, got "
BF16 = needs(
    "--precision bf16",
    lambda run: run.precision is Precision.BF16,
    "--precision {config.precision}",
)
UNSCALED = needs(
    "a precision whose loss is not scaled",
    lambda run: run.precision is not Precision.FP16,
    "--precision {config.precision}",
)
FUSED_OPTIMIZER = needs(
    "--optimizer fused",
    lambda run: run.mode is not Mode.TRAIN or run.optimizer is OptimizerKind.FUSED,
    "--optimizer {config.optimizer}",
)
WHOLE_GRADIENTS = needs(
    "a way that leaves all gradients to each rank (--parallel ddp-naive, ddp-flat, ddp-overlap, "
    "ddp-push or ddp)",
    lambda run: run.parallel is not Parallel.NONE and not run.parallel.shards_parameters,
    "--parallel {config.parallel}",
)
GRADIENTS = needs(
    "gradients, so --mode forward-backward or train",
    lambda run: run.mode.has_backward,
    "--mode {config.mode}",
)
TRAINING = needs("--mode train", lambda run: run.mode is Mode.TRAIN, "--mode {config.mode}")
ON_GPU = needs("--device cuda", lambda run: run.device is Device.CUDA, "--device {config.device}")
SDPA = needs(
    "--attention sdpa",
    lambda run: run.model.attention is Attention.SDPA,
    "--attention {config.model.attention}",
)
CAST_ONCE = needs("--cast-once", lambda run: run.cast_once, "none")
FUSED_BLOCKS = needs("--fused-blocks", lambda run: run.fused_blocks, "none")


def is_unicode(text: str) -> bool:
    """False for a file name that is not UTF-8: Python holds it with lone surrogates, which JSON
    cannot represent.
    """
    return text.encode(errors="ignore").decode() == text


def is_import_name(text: str) -> bool:
    """Whether the text has the form package.module:name."""
    module, separator, name = text.partition(":")
    parts = [*module.split("."), *name.split(".")]
    return bool(separator) and all(part.isidentifier() for part in parts)
