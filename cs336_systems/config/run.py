"""One configuration to measure: a step, and how it is measured."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import itemgetter
from types import MappingProxyType
from typing import Annotated, Any

from ..choices import Attention, Mode, Parallel, Phase
from ..rules import is_unicode
from ..settings import Rule, Setting, check, declared, in_words, make_choices, non_defaults
from ..shapes import SIZES, ModelConfig
from .ranks import RankSettings

MAX_ELEMENTS = 2**42
"""Bound on the elements of the logits and of one block's attention scores, which fit no device
either.
"""
UNSIZED = "own"
"""`size` of a user's own model whose factory takes no sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig(RankSettings):
    """One configuration to measure, complete enough for a fresh process to run it.

    To add a setting, add a field to the class of its kind, with its declaration, and the code that
    obeys it. The order of declaration is that of flags and columns.
    """

    learning_rate: Annotated[
        float,
        Setting(
            "Learning rate of AdamW.",
            word="lr",
            label=4,
            note="learning rate {}",
            rules=(
                Rule(
                    lambda run: 0 < run.learning_rate < 1,
                    "learning_rate must be between 0 and 1, got {config.learning_rate}",
                ),
            ),
            csv_place=24,
            without_cost=True,
        ),
    ] = 1e-3
    measured_steps: Annotated[
        int,
        Setting(
            "Steps that are timed, after the warm-up.",
            least=1,
            heading="steps",
            label=4,
            note="{} measured steps",
            notes={1: "1 measured step"},
            noted="always",
            always_in_csv=True,
            without_cost=True,
            is_common=True,
        ),
    ] = 10
    sync_phases: Annotated[
        bool,
        Setting(
            "Synchronise after every phase, the textbook way, instead of recording events on the "
            "stream.",
            label=5,
            column="phases",
            cells={False: "by events", True: "synchronised"},
            csv_place=40,
            without_cost=True,
        ),
    ] = False
    ranges: Annotated[
        bool,
        Setting(
            "Annotate the step with NVTX ranges.",
            label=5,
            cells={False: "off", True: "on"},
            csv_place=41,
            without_cost=True,
        ),
    ] = True
    tokens: Annotated[
        str | None,
        Setting(
            "Token file to read batches from (.npy, one axis of integers).",
            metavar="FILE",
            default="random tokens",
            label=5,
            cells={None: "random"},
            rules=(
                Rule(
                    lambda run: is_unicode(run.tokens),
                    "tokens needs a file name that is valid UTF-8, got {config.tokens!r}; rename "
                    "the file",
                ),
            ),
            csv_place=42,
            without_cost=True,
            is_common=True,
        ),
    ] = None
    seed: Annotated[
        int,
        Setting(
            "Seed of the weights and the tokens.", least=0, label=4, csv_place=43, without_cost=True
        ),
    ] = 0
    repeat: Annotated[
        int,
        Setting(
            least=0,
            word="#",
            label=6,
            csv_place=31,
            named_last=True,
            noted="never",
            without_cost=True,
        ),
    ] = 0
    """Which of several fresh processes of the same configuration this is, from 0."""

    def __post_init__(self) -> None:
        """Turn strings into members of enumerations, reset settings that have no effect to their
        defaults, and raise ValueError for a configuration that cannot be run.
        """
        make_choices(self)
        for part, setting in declared(self):
            if setting.used_with is not None:
                other, values = setting.used_with
                if getattr(self, other) not in values:
                    object.__setattr__(self, part.name, part.default)
        check(self)
        if self.warmup_steps + self.measured_steps > 1_000_000:
            raise ValueError(
                "warmup_steps + measured_steps must be at most 1000000, got "
                f"{self.warmup_steps + self.measured_steps}"
            )
        tokens = self.batch_size * self.model.context_length
        widths = [self.model.vocab_size, self.model.d_ff]
        if self.model.attention is Attention.NAIVE:  # fused attention keeps no scores
            widths.append(self.model.num_heads * self.model.context_length)
        elements = tokens * max(widths)
        if elements > MAX_ELEMENTS:
            raise ValueError(
                f"one tensor of the step would hold {elements:.1e} elements, more than "
                f"{MAX_ELEMENTS:.0e}: check batch_size, context_length and vocab_size"
            )

    @property
    def has_nothing_to_compile(self) -> bool:
        """Whether the blocks are matmuls and ready kernels alone, and graphs launch them.

        torch.compile would fuse nothing there, and importing it and compiling take seconds. In fp8
        it fuses the scales, and with checkpoints the residual additions. Steps of sharded
        parameters were measured with compiled blocks only.
        """
        has_more = self.fp8 or self.checkpoint_blocks or self.parallel.shards_parameters
        return self.fused_blocks and self.cuda_graph and not has_more

    @property
    def loss_divisor(self) -> int:
        """What the mean loss of a micro-batch is divided by before backward: the number of
        micro-batches, and that of ranks which copy gradients to each other, and only add them up.
        """
        if self.parallel.writes_to_others:
            return self.accumulate_steps * self.ranks
        return self.accumulate_steps

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step, those of all micro-batches and ranks together."""
        sequences = self.ranks * self.accumulate_steps * self.batch_size
        return sequences * self.model.context_length

    @property
    def key(self) -> str:
        """File name of this run's record: readable, unique among configurations, safe on every
        file system.
        """
        # a record from elsewhere may call its size anything
        size = re.sub(r"[^A-Za-z0-9.-]+", "-", self.size).lstrip(".-")[:32]
        shape = (
            f"{size}_ctx{self.model.context_length}_b{self.batch_size}_{self.mode}_{self.precision}"
        )
        return f"{shape}_{self.digest}_r{self.repeat}"

    @property
    def digest(self) -> str:
        """Ten hexadecimal digits that all repeats of this run share, and no other run has."""
        chosen = json.dumps(
            [non_defaults(self.configuration), non_defaults(self.model)], sort_keys=True
        )
        return hashlib.sha256(chosen.encode()).hexdigest()[:10]

    @property
    def configuration(self) -> "RunConfig":
        """The same run with repeat 0, which is equal for all repeats of a configuration."""
        return self.with_defaults("repeat")

    @property
    def without_shortcuts(self) -> "RunConfig":
        """The same run without shortcuts: settings that make the same step faster, and seldom
        raise its memory.
        """
        shortcuts = [part.name for part, setting in declared(self) if setting.is_shortcut]
        return self.with_defaults(*shortcuts)

    def with_defaults(self, *names: str) -> "RunConfig":
        """The same run with these settings at their defaults."""
        declarations = type(self).__dataclass_fields__
        defaults: dict[str, Any] = {name: declarations[name].default for name in names}
        is_changed = any(getattr(self, name) != value for name, value in defaults.items())
        return replace(self, **defaults) if is_changed else self

    @property
    def unprofiled(self) -> "RunConfig":
        """The same run without a profiler."""
        return self.with_defaults("profiler")

    @property
    def without_graph(self) -> "RunConfig":
        """The same run without CUDA graphs."""
        return self.with_defaults("cuda_graph")

    @property
    def alone(self) -> "RunConfig":
        """The same training step, run by one process and not shared among ranks."""
        return self.with_defaults(*OF_SEVERAL_RANKS)

    @property
    def has_own_parts(self) -> bool:
        """Whether the optimizer, or the way to share the step, is the user's, which nobody can
        foretell.
        """
        return self.parallel is Parallel.OWN or self.own_optimizer is not None

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Phases that this run times, in order, without the whole step."""
        phases: tuple[Phase, ...] = {
            Mode.INFERENCE: (Phase.FORWARD,),
            Mode.FORWARD: (Phase.FORWARD,),
            Mode.FORWARD_BACKWARD: (Phase.FORWARD, Phase.BACKWARD),
            Mode.TRAIN: (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER),
        }[self.mode]
        if self.is_shared:
            after = phases.index(Phase.BACKWARD) + 1
            phases = (*phases[:after], Phase.COMMUNICATION, *phases[after:])
        return phases if self.tokens is None else (Phase.DATA, *phases)

    @property
    def launched_phases(self) -> tuple[Phase, ...]:
        """The phases that are launched in a step, in order: those of each micro-batch, and what
        follows the last. Ranks that shard parameters exchange gradients in every micro-batch.
        """
        micro_batch = [Phase.FORWARD, Phase.BACKWARD]
        if self.parallel.shards_parameters:
            micro_batch.append(Phase.COMMUNICATION)
        phases = [phase for phase in self.phases if phase is not Phase.DATA]
        return (*micro_batch * (self.accumulate_steps - 1), *phases)

    @property
    def label(self) -> str:
        """A few words that describe the run to people: every setting that differs from its default,
        except the device.
        """
        preset = SIZES.get(self.size)
        words: list[tuple[int, str]] = []

        def add_words(name: str, setting: Setting, value: object, usual: object) -> None:
            """Add the setting in words, with its place in the label (`setting.label`).

            Place 0 is always shown and None never; others only with a value that is not the usual
            one, which is the preset's for a size of the model, and else the default.
            """
            if setting.label == 0 or (setting.label is not None and value != usual):
                words.append((setting.label, in_words(name, setting, value)))

        for part, setting in declared(self):
            if part.name != "model":
                add_words(part.name, setting, getattr(self, part.name), part.default)
                continue
            for size, of_model in declared(self.model):
                if self.size != UNSIZED or of_model.binds_own_model:
                    usual = getattr(preset, size.name, size.default)
                    add_words(size.name, of_model, getattr(self.model, size.name), usual)
        words.sort(key=itemgetter(0))
        return " ".join(word for _, word in words if word)


SETTINGS: Mapping[str, Setting] = MappingProxyType(
    {
        part.name: setting
        for part, setting in (*declared(RunConfig), *declared(ModelConfig))
        if part.name != "model"
    }
)
"""The declarations of all settings of a run, by their names."""
USED_WITH = {
    name: setting.used_with for name, setting in SETTINGS.items() if setting.used_with is not None
}
"""Settings that only have an effect with some values of another one: that one, and its values."""
OF_SEVERAL_RANKS = tuple(
    name
    for name, setting in SETTINGS.items()
    if setting.group == "parallel" or USED_WITH.get(name, ("",))[0] == "parallel"
)
"""Settings that say how ranks share a step, `parallel` first."""
