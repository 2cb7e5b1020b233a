"""What a step's account says of its memory, as tables: what the predicted peak holds, what
checkpoints keep, what fits.
"""

from collections.abc import Iterator
from dataclasses import asdict, replace

from ...analysis.memory.profile import Category as Measured
from ...config import RunConfig
from ...costs import fit, memory
from ...costs.checkpoints import checkpoint_schedules
from ...costs.tape import Category
from ...costs.traces import is_compiled, why_untraced
from ..charts import CATEGORY_COLOURS, Style
from ..columns import Row, column, columns_of
from ..section import Table, make_table, quantity_table
from ..words import GIB, MIB, significant

NOT_SEARCHED = (
    "Each batch that was tried was compiled, and the longest context of a compiled step is not "
    "searched: it would take minutes more."
)
_MEASURED = {
    Category.PARAMETERS: Measured.PARAMETERS,
    Category.BUFFERS: Measured.BUFFERS,
    Category.GATHERED: Measured.KEPT,
    Category.GRADIENTS: Measured.GRADIENTS,
    Category.OPTIMIZER_STATE: Measured.OPTIMIZER_STATE,
    Category.WEIGHT_COPIES: Measured.AUTOCAST_COPIES,
    Category.ACTIVATIONS: Measured.SAVED,
    Category.LOSS: Measured.LATER,
    Category.TEMPORARIES: Measured.TEMPORARY,
    Category.OPTIMIZER_WORKSPACE: Measured.EARLIER,
    Category.LIBRARY_WORKSPACE: Measured.HELD,
    Category.UNSPLIT: Measured.POOL,
}
"""The category of a measured peak whose colour each category has: the same one where there is."""
CATEGORIES = {
    str(category): Style(colour=CATEGORY_COLOURS[measured])
    for category, measured in _MEASURED.items()
}


def sizes_at_peak(prediction: memory.MemoryPrediction) -> dict[Category, int]:
    """The bytes of each category that the predicted peak holds."""
    sizes = {category: prediction.peak.bytes_of(category) for category in Category}
    return {category: size_bytes for category, size_bytes in sizes.items() if size_bytes}


def checkpoints_tables(config: RunConfig) -> Iterator[Table]:
    """The table of what the blocks keep for backward with checkpoints, nested ones too."""
    rows = [
        {
            "what": schedule.name,
            "expression": schedule.expression,
            "size_bytes": schedule.kept_bytes,
            "count": schedule.again,
        }
        for schedule in checkpoint_schedules(config)
    ]
    if not rows:
        return
    columns = columns_of(
        column("what", name="checkpoints"),
        column("expression", name="kept"),
        "size_bytes",
        column("count", name="blocks run again", about="Forward passes of blocks."),
    )
    note = (
        f"N is {config.model.num_layers} blocks, s the input of a block, A all that it keeps. "
        "--checkpoint-blocks runs the first three; nested checkpoints are not run here, and "
        "neither are selective ones, which also keep r, the results of attention and of every "
        "second linear layer, and run a part of each block again."
    )
    yield make_table("Activations of the blocks with checkpoints", columns, rows, [note])


def categories_table(prediction: memory.MemoryPrediction) -> Table:
    """The table of the predicted peak of memory by category; empty categories are left out."""
    rows, peak = [], prediction.peak
    for category, size_bytes in sizes_at_peak(prediction).items():
        share = size_bytes / peak.allocated_bytes
        rows.append({"category": category, "size_bytes": size_bytes, "share": share})
    notes = []
    if peak.bytes_of(Category.UNSPLIT):
        notes.append(
            "Unsplit rest: a cached block may be up to 1 MiB larger than its tensor, since the "
            "allocator splits off no less."
        )
    columns = columns_of("category", "size_bytes", "share")
    return make_table("The peak by category", columns, rows, notes)


def peak_table(prediction: memory.MemoryPrediction, top: int) -> Table:
    """The table of the `top` largest tensors at the predicted peak; a note says how many more there
    are.
    """
    peak = prediction.peak
    shown = sorted(peak.parts, key=lambda part: -part.size_bytes)[:top]
    rows = [
        asdict(part) | {"what": part.label, "share": part.size_bytes / peak.allocated_bytes}
        for part in shown
    ]
    columns = columns_of(
        column("category", drop_order=0),
        "what",
        column("count", drop_order=3),
        "size_bytes",
        "share",
        "formula",
    )
    notes = []
    if rest := peak.allocated_bytes - sum(part.size_bytes for part in shown):
        more = len(peak.parts) - len(shown)
        notes.append(f"{more} more hold {significant(rest / MIB)} MiB.")
    title = f"The peak, {significant(peak.allocated_bytes / GIB)} GiB in {peak.phase}"
    return make_table(title, columns, rows, notes)


def fit_values(config: RunConfig, memory_bytes: int) -> Row:
    """Whether the step fits this memory, the largest batch size and the longest context that do;
    None where that is not predicted.
    """
    return {
        "fits": fit.fits(config, memory_bytes),
        "largest_batch_size": fit.largest_batch(config, memory_bytes),
        "longest_context_length": fit.largest_context(config, memory_bytes),
    }


def fit_table(config: RunConfig, memory_bytes: int) -> Table:
    """Whether the configuration fits, the largest batch and the longest context."""
    values = fit_values(config, memory_bytes)
    longest = values["longest_context_length"]
    answers = {True: "fits", False: "does not fit", None: None}
    rows = [
        ("this configuration", answers[values["fits"]]),
        (f"largest batch at context {config.model.context_length:,}", values["largest_batch_size"]),
        (f"longest context at batch {config.batch_size:,}", longest),
    ]
    notes = ["On an otherwise empty GPU; the CUDA context and fragmentation are counted."]
    if reason := fit.why_not_searched(config):
        notes.append(f"The largest batch is not foretold: {reason}.")
    elif is_compiled(config):
        notes.append(NOT_SEARCHED)
    if longest is not None:
        longer = replace(config, model=replace(config.model, context_length=longest + 1))
        if reason := why_untraced(longer):
            notes.append(f"A context of {longest + 1:,} cannot be traced: {reason}")
    title = f"What fits {significant(memory_bytes / GIB)} GiB"
    return quantity_table(title, rows, notes, ("question", "answer"))
