"""Answers on paper: from ceilings and closed forms, without a run."""

from cs336_systems.config import SIZES, Device, Precision
from cs336_systems.costs.limits import FEED_FORMULAS, Given, Paper, Scheme, bounds, feed, largest_ranks
from cs336_systems.costs.links import measured_links
from cs336_systems.costs.shards import factor_bytes
from cs336_systems.report.numbers import GIGA, count, significant
from cs336_systems.report.page.answers.answer import Answer, Material
from cs336_systems.report.sections.scale import WORDS, limit_tables, link_source, rate_source
from cs336_systems.studies.ceilings_files import Ceilings

SIZE, PRECISION = "8B", Precision.BF16
CONTEXT, SEQUENCES, GPUS, NETWORK_GB_PER_S = 512, 8192, 8, 50
PARALLELISM = (
    f"cs336 scale --size {SIZE} --ranks 8 64 1024 --global-batch-size {SEQUENCES} --network-gb-per-s {NETWORK_GB_PER_S}"
)
"""What answers for the model of the leaderboard, a batch as large models have, and nodes as GPUs are sold in."""


def parallelism(material: Material) -> Answer | None:
    """From how many ranks on communication limits each way, by the ceilings of a GPU among several of it."""
    collection = material.collection
    studies = {path: each for path, each in collection.ceilings.items() if each.grid.device is Device.CUDA}
    ceilings = Ceilings(tuple(studies.values()))
    for directory, study in studies.items():
        name = study.device_name
        links = measured_links(ceilings.collectives(name), GPUS, NETWORK_GB_PER_S * GIGA)
        rate = ceilings.flops_per_s(name, PRECISION)
        if study.reductions and links is not None and rate is not None:
            paper = Paper(
                tokens=SEQUENCES * CONTEXT, feed=feed(SIZES[SIZE]), flops_per_s=rate, links=links,
                weight_bytes=factor_bytes(PRECISION), activation_bytes=factor_bytes(PRECISION),
            )  # fmt: skip
            given = Given(
                paper=paper, feed_formula=FEED_FORMULAS[SIZES[SIZE].arch],
                rate_source=rate_source(name, PRECISION, is_measured=True),
                link_source=link_source(links.measured_ranks), network_source="assumed",
            )  # fmt: skip
            return Answer(
                sentences=_sentences(paper),
                tables=limit_tables(given),
                places=[(directory, "collectives")],
                commands=[f"{PARALLELISM} --device-name '{name}'"],
                conditions=f"{SIZE}, {PRECISION}, {name}, {GPUS} in a node, network {NETWORK_GB_PER_S} GB/s for each",
            )
    return None


def _sentences(paper: Paper) -> list[str]:
    """The largest number of ranks of each way, and the tokens that a rank of the first two needs."""
    most = {scheme: largest_ranks(paper, scheme) for scheme in Scheme}
    said = [f"{count(ranks)} ranks if {WORDS[scheme]}" for scheme, ranks in most.items() if ranks is not None]
    least: dict[Scheme, float] = {}
    for bound in bounds(paper):
        least[bound.scheme] = max(least.get(bound.scheme, 0.0), bound.least_tokens or 0.0)
    return [
        f"With {paper.tokens:,} tokens in a step communication takes no longer than the matmuls of the blocks up to "
        f"{', '.join(said[:-1])}, and {said[-1]}.",
        f"Each of many ranks needs {significant(least[Scheme.DATA], 4)} tokens where whole models average gradients in "
        f"fp32, and {significant(least[Scheme.SHARDED], 4)} where bf16 parameters are gathered.",
    ]
