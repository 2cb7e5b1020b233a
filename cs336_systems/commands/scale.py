"""`cs336 scale`: a training step on many GPUs, on paper."""

from dataclasses import field
from functools import partial
from typing import Annotated

from ..config import MAX_RANKS, Attention, Device, OptimizerKind, Precision, RunConfig
from ..costs.curves import LINK_EFFICIENCY
from ..costs.hardware import DeviceSpec
from ..costs.ranks_time import Links, measured_links
from ..costs.scale import PARALLEL, Paper, feed, scale_step
from ..costs.shards import factor_bytes
from ..costs.time import require_tapes
from ..report.formats import texts_of, write_files
from ..report.sections.scale import Scale, scale_section
from ..report.words import GIGA
from ..studies.ceilings_files import Ceilings
from . import flags
from .account import ForecastArguments, curves_meant
from .configure import make_config
from .outcome import OK, checked, show

MAX_GB_PER_S = 1e6


@flags.with_flags(
    "size",
    "context_length",
    "batch_size",
    "precision",
    "optimizer",
    "checkpoint_blocks",
    rules={
        "size": "small",
        "context_length": "512, and 1024 for gpt2",
        "precision": "bf16",
        "optimizer": "fused",
    },
)
class ScaleArguments(flags.Flags, ForecastArguments):
    """Predict a training step that many GPUs share: time, exposed communication, memory and MFU of
    ddp (data parallel, PyTorch's) and fsdp (fully sharded, ours), and from how many ranks on
    communication takes longer than computing, in tensor parallelism (tp) too.

    Nothing is run, and no GPU is needed. Attention is fused unless --attention says otherwise. Each
    GPU has --batch-size sequences.
    """

    ranks: Annotated[
        tuple[int, ...] | None, flags.unset("INT [INT ...]", "powers of 2 up to a node")
    ] = None
    """Numbers of GPUs; beyond one node they must fill nodes."""
    gpus_per_node: int = 8
    """GPUs that NVLink connects."""
    network_gb_per_s: Annotated[float | None, flags.unset("GB/S", "no network: one node")] = None
    """Rate at which each GPU sends to other nodes while the others of its node do too (GB/s):
    that of its adapter.
    """
    node_gb_per_s: Annotated[
        float | None, flags.unset("GB/S", "measured, or else by the data sheet")
    ] = None
    """Rate at which each GPU sends to others of its node (GB/s)."""
    model: flags.Flat[flags.ModelArguments] = field(default_factory=flags.ModelArguments)

    def config(self) -> RunConfig:
        """The step of one process; raise ValueError for flags that contradict each other."""
        usual = {
            "size": "small",
            "precision": Precision.BF16,
            "optimizer": OptimizerKind.FUSED,
            "attention": Attention.SDPA,
        }
        config = make_config(Device.CUDA, **usual | self.given())
        if config.precision is Precision.FP16:
            raise ValueError(
                "--precision fp16 is not predicted: its gradient scaler waits for the device; use "
                "bf16"
            )
        return config

    @property
    def rank_counts(self) -> tuple[int, ...]:
        """The numbers of GPUs, each once."""
        powers = (2**power for power in range(self.gpus_per_node.bit_length()))
        return tuple(dict.fromkeys(powers if self.ranks is None else self.ranks))

    def check(self) -> None:
        """Raise ValueError for values out of range and for flags that do not go together."""
        if self.model.model is not None:
            raise ValueError(
                "the cost of a model of your own is not known from its flags: leave --model out"
            )
        for flag, numbers, most in (
            ("--gpus-per-node", (self.gpus_per_node,), 1024),
            ("--ranks", self.rank_counts, MAX_RANKS),
        ):
            if not numbers or not 1 <= min(numbers) <= max(numbers) <= most:
                raise ValueError(
                    f"{flag} must be from 1 to {most}, got {' '.join(map(str, numbers)) or 'none'}"
                )
        for flag, rate in (
            ("--network-gb-per-s", self.network_gb_per_s),
            ("--node-gb-per-s", self.node_gb_per_s),
        ):
            if rate is not None and not 0 < rate <= MAX_GB_PER_S:
                raise ValueError(f"{flag} must be above 0 and at most {MAX_GB_PER_S:g}, got {rate}")
        most = max(self.rank_counts)
        if most > self.gpus_per_node and self.network_gb_per_s is None:
            raise ValueError(
                f"{most} ranks need several nodes of {self.gpus_per_node} GPUs: give "
                "--network-gb-per-s"
            )
        if wrong := [
            ranks
            for ranks in self.rank_counts
            if ranks > self.gpus_per_node and ranks % self.gpus_per_node
        ]:
            raise ValueError(
                f"--ranks {wrong[0]} does not fill nodes of --gpus-per-node {self.gpus_per_node}"
            )


def _links(
    arguments: ScaleArguments, name: str, device: DeviceSpec | None, ceilings: Ceilings
) -> tuple[Links, str]:
    """How the GPUs are connected, and where the rate within a node comes from; raise ValueError
    if it is not known.
    """
    size = arguments.gpus_per_node
    network = None
    if arguments.network_gb_per_s is not None:
        network = arguments.network_gb_per_s * GIGA
    links = partial(Links, gpus_per_node=size, network_bytes_per_s=network)
    if arguments.node_gb_per_s is not None:
        return links(node_bytes_per_s=arguments.node_gb_per_s * GIGA), "given"
    if (measured := measured_links(ceilings.collectives(name), size, network)) is not None:
        return measured, f"best collective measured among {measured.measured_ranks} of them"
    if device is None or device.link_bytes_per_s is None:
        raise ValueError(
            f"needed --node-gb-per-s: no collectives among several {name} were measured, and how "
            "they are connected is not in its data sheet"
        )
    source = f"{LINK_EFFICIENCY:g} of NVLink, one way, by the data sheet"
    return links(node_bytes_per_s=LINK_EFFICIENCY * device.link_bytes_per_s), source


def _scale(arguments: ScaleArguments, config: RunConfig, ceilings: Ceilings) -> Scale:
    """The forecast that the flags ask for; raise ValueError if too little is known of the
    device.
    """
    name, device = arguments.machine(ceilings)
    if name is None:
        there = ""
        if ceilings.device_names:
            there = f"; there are ceilings of {', '.join(ceilings.device_names)}"
        raise ValueError(
            f"needed --device-name: this machine has no GPU whose data sheet is known{there}"
        )
    links, source = _links(arguments, name, device, ceilings)
    curves = curves_meant(name, device, config, ceilings)
    peak = None if device is None else device.peak_flops_per_s.get(config.precision)
    rate = None
    if curves is not None and curves.is_measured:
        rate = ceilings.flops_per_s(name, config.precision)
    rates = None if curves is None else curves.rates(config.precision)
    if rate is None and rates is not None:
        rate = rates.flops_per_s
    if curves is None or rate is None:
        raise ValueError(
            f"nothing is known of {name} at {config.precision}: no ceilings, and no peak in a "
            "data sheet"
        )
    paper = Paper(
        tokens=max(arguments.rank_counts) * arguments.batch_size * config.model.context_length,
        feed=feed(config.model),
        flops_per_s=rate,
        links=links,
        element_bytes=factor_bytes(config.precision),
    )
    steps = tuple(
        (scheme, ranks, scale_step(config, scheme, ranks, curves, links))
        for scheme in PARALLEL
        for ranks in arguments.rank_counts
    )
    return Scale(
        config=config,
        steps=steps,
        paper=paper,
        curves=curves,
        device_name=name,
        peak_flops_per_s=peak,
        memory_bytes=None if device is None else device.memory_bytes,
        link_source=source,
    )


def run(arguments: ScaleArguments) -> int:
    """Print the tables, and write them if --output is given."""
    checked(arguments.check)
    config = checked(arguments.config)
    require_tapes(config)
    ceilings = checked(arguments.known_ceilings)
    section = scale_section(checked(_scale, arguments, config, ceilings))
    if arguments.output is not None:
        write_files(texts_of(section), arguments.output, arguments.formats)
    show(section.tables, arguments.output)
    return OK
