"""`cs336 plan`: what training takes on many GPUs: whether it fits, how long, how much, and in which
layout.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import field, replace
from functools import cached_property, partial
from typing import Annotated, Any

from ..config import MAX_RANKS, Attention, CompileMode, Device, OptimizerKind, Precision, RunConfig
from ..costs.compiled import uncompiled
from ..costs.curves import Curves
from ..costs.depth import of_depth
from ..costs.derivation import Sizes
from ..costs.hardware import DeviceSpec, devices_called
from ..costs.kernels import ProductPrecision
from ..costs.layout_cost import why_refused, why_unknown
from ..costs.networks import links_of
from ..costs.ranks_time import Links
from ..costs.recipes import Recipe
from ..costs.shards import FP32_BYTES, factor_bytes
from ..costs.traces import one_tracer, require_tape
from ..costs.training import GlobalBatch, Training, plan_training
from ..model_file import is_model_file, longest_context
from ..report.words import GIB, GIGA
from ..studies.ceilings_files import Ceilings
from . import flags
from .account import ForecastArguments, curves_meant
from .configure import NamedGpu, checked_factory, make_config, make_fast_config
from .outcome import OK, UsageError, checked, print_page, show

MAX_GB_PER_S = 1e6
USUAL_CONTEXT = 4096
"""Tokens of a sequence of the course's model where none are asked for: those of large trainings,
and not the 512 of a benchmark.
"""
USUAL_BATCH_TOKENS = 2**22
"""Tokens of a step of a whole training: models of some billions take about 4 million."""
USUAL_SEQUENCES = 4
"""Sequences of each GPU in a single step, as elsewhere."""
GPUS = re.compile(r"(\d+)(?:x(.+))?", re.IGNORECASE)
"""A number, and after it the name of a GPU or how many a node has: `64`, `64xH100`, `2x8xH100`."""


@flags.with_flags(*flags.OF_MODEL, rules={"attention": "sdpa"})
class PlanModelArguments(flags.Flags):
    """What differs from the preset."""


@flags.with_flags(
    "size",
    "context_length",
    "precision",
    "compile",
    rules={
        "size": "small",
        "context_length": f"{USUAL_CONTEXT}, and 1024 for gpt2",
        "precision": "bf16",
    },
)
class PlanArguments(flags.Flags, ForecastArguments):
    """Say what it takes to train a model on many GPUs: whether it fits, how long, how much, and the
    best layouts (data, FSDP, tensor, pipeline, context and expert parallel), time against memory.

    Without --tokens, one step is planned. The optimizer is fused AdamW, and attention is fused.

    Nothing is run, and no GPU is needed. torch is needed only for what has to be traced: --model
    (one block of each kind), --fast, and sizes other than the presets with --compile default (one
    block and two are compiled for a GPU that is not there).
    """

    gpus: Annotated[str, flags.unset("[NODES x] N [x NAME]", 8)] = "8"
    """GPUs, such as 8, 64xH100, or 2x8xH200 for two nodes of eight."""
    tokens: Annotated[flags.ScaledNumber | None, flags.unset("T", "one step")] = None
    """Tokens to train on, such as 300B, 1T or 15e12."""
    price: Annotated[float | None, flags.unset("PRICE", "not asked")] = None
    """Price of an hour of one GPU."""
    global_batch: Annotated[
        str | None, flags.unset("N", "4M tokens, and for one step 4 sequences a GPU")
    ] = None
    """Batch of all GPUs in a step: 1024 is sequences, and 4M, with a letter, is tokens. Sequences
    are rounded to a multiple that the GPUs can share. Tokens change by at most 5 %, so that the
    GPUs can also divide them in micro-batches.
    """
    budget_gib: Annotated[float | None, flags.unset("GIB", "that of the data sheet")] = None
    """Memory of a GPU (GiB)."""
    days: Annotated[float | None, flags.unset("DAYS", "not asked")] = None
    """Say how many of these GPUs the training needs to end in so many days; needs --tokens."""
    network_gb_per_s: Annotated[
        float | None, flags.unset("GB/S", "that of the usual node of such GPUs")
    ] = None
    """Rate at which each GPU sends to other nodes while the others of its node do too (GB/s):
    that of its adapter.
    """
    node_gb_per_s: Annotated[
        float | None, flags.unset("GB/S", "measured, or else by the data sheet")
    ] = None
    """Rate at which each GPU sends to others of its node (GB/s)."""
    fp8: Annotated[Recipe | None, flags.unset("{tensor,blocks,mx}", "bf16")] = None
    """Compute the linear layers of blocks in fp8, with one scale for each tensor (of this step, not
    of earlier ones), for 128 elements or squares of a weight, or for 32 elements (MXFP8, from
    Blackwell on). What lies between matmuls is fused, as in Transformer Engine.
    """
    fast: flags.Switch = False
    """Plan steps as `benchmark --fast` runs them, on one GPU, or on ranks by this program's own
    data parallelism and FSDP. Of --fp8, only tensor.
    """
    model: flags.Flat[PlanModelArguments] = field(default_factory=PlanModelArguments)
    derive: flags.Switch = False
    """Instead, say what ranks compute and send on paper: expressions beside their numbers, for a
    block and its feed-forward network, and the most ranks before communication limits.
    """
    json: flags.Switch = False
    """Print JSON instead of tables."""

    @cached_property
    def machines(self) -> tuple[int, int | None, str | None]:
        """Number of GPUs, of those of a node if it is given, and the name of the GPU; raise
        ValueError for a text that says none.
        """
        match = GPUS.fullmatch(self.gpus.strip())
        count, in_node, name = 0, None, None
        if match is not None:
            count = int(match[1])
            name = match[2]
        # 8x4090 names a GPU, not a node of 4090
        if name is not None and not devices_called(name):
            of_node = GPUS.fullmatch(name)
            if of_node is not None:
                in_node = int(of_node[1])
                name = of_node[2]
                count *= in_node
        if not 1 <= count <= MAX_RANKS:
            raise ValueError(
                f"--gpus must be a number from 1 to {MAX_RANKS:,}, such as 8, 64xH100 or "
                f"2x8xH200, got {self.gpus[:40]!r}"
            )
        return count, in_node, name

    def check(self) -> None:
        """Raise ValueError for values out of range and for flags that do not go together."""
        for flag, number, most in (
            ("--network-gb-per-s", self.network_gb_per_s, MAX_GB_PER_S),
            ("--node-gb-per-s", self.node_gb_per_s, MAX_GB_PER_S),
            ("--budget-gib", self.budget_gib, 1e6),
            ("--days", self.days, 1e5),
            ("--price", self.price, 1e6),
            ("--tokens", self.tokens, 1e18),
        ):
            if number is not None and not 0 < number <= most:
                raise ValueError(f"{flag} must be above 0 and at most {most:g}, got {number:g}")
        if self.days is not None and self.tokens is None:
            raise ValueError("--days needs --tokens, such as --tokens 1T")
        if self.price is not None and self.tokens is None:
            raise ValueError(
                "--price needs --tokens, such as --tokens 1T: it is that of a training"
            )
        if self.fast and self.days is not None:
            raise ValueError("--days is not searched with --fast: give a number of GPUs by --gpus")
        if self.fast and self.fp8 not in (None, Recipe.TENSOR):
            raise ValueError(
                f"--fast has one fp8 scale for each tensor: --fp8 tensor, got {self.fp8}"
            )
        name = self.machines[2]
        if name is not None and self.device_name is not None:
            raise ValueError(f"--gpus {self.gpus} names the GPU already: leave --device-name out")

    def config(self) -> RunConfig:
        """The step of one process; raise ValueError for flags that contradict each other, and for
        steps of which no layout is forecast, and TorchError if that takes a trace.
        """
        usual: dict[str, Any] = {
            "size": "small",
            "precision": Precision.BF16,
            "optimizer": OptimizerKind.FUSED,
            "attention": Attention.SDPA,
        }
        given = self.given()
        if self.fast:
            if given.get("model_factory") is not None:
                raise ValueError("no plan: --fast is for this project's models")
            given.pop("compile", None)  # it is asked of each step
        is_gpt2 = str(given.get("size", "")).lower().startswith("gpt2")
        if not is_gpt2:
            usual["context_length"] = self._usual_context(given.get("model_factory"))
        if given.get("compile", CompileMode.NONE) is not CompileMode.NONE:
            if given.get("model_factory") is not None:
                raise ValueError(
                    "no plan: --compile is for this project's models, of which one block is "
                    "compiled; of a model of your own the whole would be"
                )
            usual["compile_blocks"] = True
        config = checked_factory(make_config(Device.CUDA, **usual | given), given)
        reason = why_refused(config)
        if not reason:
            for blocks in (1, 2):
                require_tape(uncompiled(of_depth(config, blocks)))
            reason = why_unknown(config)
        if reason:
            raise ValueError(f"no plan: {reason}")
        return config

    def _usual_context(self, model: str | None) -> int:
        """The context where none is asked for: no more than a configuration file allows."""
        longest = longest_context(model) if model is not None and is_model_file(model) else None
        return min(USUAL_CONTEXT, longest or USUAL_CONTEXT)

    def batch(self, context_length: int) -> GlobalBatch:
        """The sequences of a step on all GPUs, which share them equally."""
        gpus = self.machines[0]
        is_tokens = False
        if self.global_batch is None:
            wanted = float(USUAL_SEQUENCES * gpus)
            if self.tokens is not None:
                wanted = USUAL_BATCH_TOKENS / context_length
                is_tokens = True
        else:
            text = self.global_batch.strip()
            wanted = flags.scaled_number(text)
            if text[-1:].upper() in flags.SCALES:
                wanted /= context_length
                is_tokens = True
        if not 0 < wanted <= 2**30:
            raise ValueError(f"--global-batch is no number of sequences, got {self.global_batch}")
        return GlobalBatch(wanted=wanted, is_tokens=is_tokens)


def _links(
    arguments: PlanArguments, name: str, device: DeviceSpec | None, ceilings: Ceilings
) -> tuple[Links, str]:
    """How the GPUs are joined, and what says so; raise ValueError if it is not known."""
    given = {
        "node_bytes_per_s": arguments.node_gb_per_s,
        "network_bytes_per_s": arguments.network_gb_per_s,
    }
    rates = {key: GIGA * rate for key, rate in given.items() if rate is not None}
    count, in_node, _ = arguments.machines
    measured = ceilings.collectives(name)
    if arguments.days is not None:
        with suppress(ValueError):  # no network is known, so that one node is all that is tried
            return links_of(name, device, measured, gpus=MAX_RANKS, gpus_per_node=in_node, **rates)
    return links_of(name, device, measured, gpus=count, gpus_per_node=in_node, **rates)


def _training(arguments: PlanArguments, config: RunConfig, ceilings: Ceilings) -> Training:
    """What is asked, with all that is known of the GPUs; raise ValueError if it is too little."""
    count, _, named = arguments.machines
    asked = arguments if named is None else replace(arguments, device_name=named)
    name, device = asked.machine(ceilings)
    if name is None:
        raise ValueError(
            "needed the name of the GPU, such as --gpus 8xH100: this machine has none whose data "
            "sheet is known"
        )
    links, link_source = _links(arguments, name, device, ceilings)
    curves = curves_meant(name, device, of_depth(config, 1), ceilings)
    if curves is None or config.precision not in curves.matmuls:
        raise ValueError(f"nothing is known of {name} at {config.precision}")
    multiplied = ProductPrecision(config.precision if arguments.fp8 is None else "fp8")
    memory_bytes = None if device is None else device.memory_bytes
    if arguments.budget_gib is not None:
        memory_bytes = round(arguments.budget_gib * GIB)
    if memory_bytes is None:
        raise ValueError(f"no data sheet says how much memory {name} has: give --budget-gib")
    recipe = arguments.fp8
    if recipe is not None:
        reason = _why_no_fp8(recipe, config, name, device, curves)
        if reason:
            raise ValueError(f"--fp8 {recipe}: {reason}")
    fast = None
    if arguments.fast:
        fast = partial(_fast_step, arguments, config, NamedGpu(name, memory_bytes))
    return Training(
        config=config,
        recipe=recipe,
        gpus=count,
        device_name=name,
        batch=arguments.batch(config.model.context_length),
        tokens=arguments.tokens,
        price=arguments.price,
        days=arguments.days,
        memory_bytes=memory_bytes,
        peak_flops_per_s=None if device is None else device.peak(multiplied),
        curves=curves,
        links=links,
        fast=fast,
        link_source=link_source,
    )


def _fast_step(
    arguments: PlanArguments, config: RunConfig, gpu: NamedGpu, asked: Mapping[str, Any]
) -> RunConfig:
    """The step that --fast chooses for this GPU by the flags of the plan and what is asked besides;
    raise ValueError for what does not go together.
    """
    wanted = arguments.given() | dict(asked)
    usual: dict[str, Any] = {
        "size": "small",
        "context_length": config.model.context_length,
        "precision": Precision.FP32,
    }
    return make_fast_config(Device.CUDA, wanted, gpu, **usual | wanted)


def _why_no_fp8(
    recipe: Recipe, config: RunConfig, name: str, device: DeviceSpec | None, curves: Curves
) -> str:
    """Why such a step is not forecast in fp8; empty if it is."""
    if config.compile is not CompileMode.NONE:
        return "compiled blocks have their casts to fp8 within other kernels: leave --compile out"
    if config.precision is not Precision.BF16:
        return f"all but the matmuls is in bf16, got --precision {config.precision}"
    if ProductPrecision.FP8 not in curves.matmuls:
        return f"{name} has no matmuls in fp8 by its data sheet, and none was measured"
    if recipe is Recipe.MX and not (device and device.has_mx):
        return f"{name} has no matmuls with scales of 32 elements: use tensor or blocks"
    return ""


@one_tracer()
def run(arguments: PlanArguments) -> int:
    """Print the plan, and write it if --output is given."""
    checked(arguments.check)
    config = checked(arguments.config)
    ceilings = checked(arguments.known_ceilings)
    training = checked(_training, arguments, config, ceilings)
    if arguments.derive:
        return _derive(arguments, training, ceilings)
    plan = plan_training(training)
    from ..files import encode_json
    from ..report.formats import pngs_of, texts_of, write_files
    from ..report.sections.plan import plan_answer, plan_json, plan_section

    section = plan_section(plan)
    if arguments.output is not None:
        files = texts_of(section) | pngs_of(section)
        write_files(files, arguments.output, arguments.formats)
    sentences = [*plan_answer(plan)]
    show(
        section.tables,
        arguments.output,
        sentences,
        json=encode_json(plan_json(plan)) if arguments.json else None,
    )
    if not arguments.json:
        from ..report.page.forecasts import folder_of, write_forecast_page

        label = f"{config.label} on {training.gpus} {training.device_name}"
        directory = arguments.output or folder_of("plans", label)
        title = f"A plan of training: {label}"
        print_page(partial(write_forecast_page, title, sentences, section, directory))
    return OK


def _derive(arguments: PlanArguments, training: Training, ceilings: Ceilings) -> int:
    """Print what ranks compute and send on paper, and write it if --output is given."""
    from ..files import encode_json
    from ..report.formats import texts_of, write_files
    from ..report.sections.derivation import Derivation, derivation_section

    config, links = training.config, training.links
    flops_per_s = None
    if training.curves.is_measured:
        flops_per_s = ceilings.flops_per_s(training.device_name, config.precision)
    rates = training.curves.rates(config.precision)
    if flops_per_s is None and rates is not None:
        flops_per_s = rates.flops_per_s
    if flops_per_s is None:
        raise UsageError(f"the rate of {training.device_name} in matmuls is not known")
    within = min(training.gpus, links.gpus_per_node)
    rate = links.node_bytes_per_s
    if training.gpus > within and links.network_bytes_per_s is not None:
        rate = min(rate, links.network_bytes_per_s)
    sizes = Sizes(
        B=training.step_tokens,
        D=config.model.d_model,
        D_FF=config.model.d_ff,
        C=flops_per_s,
        W=rate,
        X=training.gpus // within,
        Y=within,
        e=factor_bytes(config.precision),
        g=FP32_BYTES,
    )
    section = derivation_section(
        Derivation(model=config.model, sizes=sizes, node_bytes_per_s=links.node_bytes_per_s)
    )
    if arguments.output is not None:
        write_files(texts_of(section), arguments.output, arguments.formats)
    json = encode_json(list(section.rows)) if arguments.json else None
    show(section.tables, arguments.output, json=json)
    return OK
