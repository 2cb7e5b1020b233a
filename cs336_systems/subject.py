"""What a record is about: a configured step, or a training loop of the user's that was watched."""

import hashlib
import re
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from .config import Device, Mode, Precision, Profiler, RunConfig

_MODULE_OF_EARLIER_LOOPS = "watch"
"""Module part of `model_factory` in earlier records of watched loops, which were those of runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedLoop:
    """A training loop of the user's, with what was seen of it; None is what was not seen."""

    name: str
    device: Device
    profiler: Profiler = Profiler.NONE
    warmup_steps: int
    """Steps before the measured ones."""
    measured_steps: int = 0
    mode: Mode | None = None
    """The phases that were seen; None before the first measured step."""
    precision: Precision | None = None
    """Precision of the matmuls in the last forward pass."""
    context_length: int | None = None
    """Length of the last axis of the tokens that the last forward pass was given."""
    tokens_per_step: int | None = None
    """Median over the measured steps; of a step, the tokens of all its forward passes."""
    repeat: int = 0
    """Which of several processes that ran the same loop this is, from 0."""
    earlier_key: str | None = field(default=None, repr=False, compare=False)
    """Key that an earlier version gave the record, and so the names of the loop's files."""

    @property
    def batch_size(self) -> int | None:
        """Sequences in a step; None where they differ in length."""
        if not self.context_length or not self.tokens_per_step:
            return None
        sequences, rest = divmod(self.tokens_per_step, self.context_length)
        return None if rest else sequences

    @property
    def key(self) -> str:
        """File name of the loop's record, without an ending: readable, and unique among loops; made
        as `RunConfig.key` is.
        """
        if self.earlier_key is not None:
            return self.earlier_key
        words = [self.name]
        if self.context_length is not None:
            words.append(f"ctx{self.context_length}")
        if self.batch_size is not None:
            words.append(f"b{self.batch_size}")
        words += self._mode_and_precision
        shape = re.sub(r"[^A-Za-z0-9._-]+", "-", "_".join(words)).lstrip(".-")[:80]
        return f"{shape}_{self.digest}_r{self.repeat}"

    @property
    def _mode_and_precision(self) -> list[str]:
        return [str(value) for value in (self.mode, self.precision) if value is not None]

    @property
    def digest(self) -> str:
        """Ten hexadecimal digits that all repeats of this loop share, and no other loop has."""
        return hashlib.sha256(repr(self.configuration).encode()).hexdigest()[:10]

    @property
    def configuration(self) -> "WatchedLoop":
        """The same loop with repeat 0, which is equal for all repeats."""
        return replace(self, repeat=0)

    @property
    def unprofiled(self) -> "WatchedLoop":
        """The same loop without a profiler."""
        return replace(self, profiler=Profiler.NONE)

    @property
    def label(self) -> str:
        """A few words for people."""
        words = [self.name]
        if self.context_length is not None:
            words.append(f"ctx {self.context_length}")
        words += self._mode_and_precision
        return " ".join(words)


Subject: TypeAlias = RunConfig | WatchedLoop


def loop_of_earlier_record(config: RunConfig) -> WatchedLoop | None:
    """The loop that an earlier version of this program recorded as a run; None for a run.

    Where no tokens were seen, such a record has one sequence of one token as a stand-in.
    """
    prefix, _, name = (config.model_factory or "").partition(":")
    if prefix != _MODULE_OF_EARLIER_LOOPS:
        return None
    has_tokens = config.tokens_per_step > 1
    return WatchedLoop(
        name=name,
        device=config.device,
        profiler=config.profiler,
        warmup_steps=config.warmup_steps,
        measured_steps=config.measured_steps,
        mode=config.mode,
        precision=config.precision,
        context_length=config.model.context_length if has_tokens else None,
        tokens_per_step=config.tokens_per_step if has_tokens else None,
        repeat=config.repeat,
        earlier_key=config.key,
    )
