"""Writes drawn programs as torch.profiler and nsys write them."""

from pathlib import Path

from tests.analysis.kernels import tracing
from tests.analysis.kernels.drawn_machine import Machine
from tests.analysis.kernels.drawn_plans import TABLES
from tests.analysis.kernels.kineto_files import Event, annotations, recorded_events, write_trace


def write(file: Machine, directory: Path) -> Path:
    """Write the file of the rank, of several beside each other."""
    recording, plan = recording_of(file), file.plan
    if plan.is_nsys:
        # the package nvtx registers its strings, PyTorch's nvtx writes them into the event
        is_registered = plan.seed % 2 == 0
        return tracing.write_export(directory / "r.sqlite", recording, registered=is_registered)
    name = TABLES["files"][plan.seed % 3].format(file.rank, 100 + file.rank)
    world = {"backend": "nccl", "rank": file.rank, "world_size": plan.ranks}
    top = {"distributedInfo": world} if plan.ranks > 1 else {}
    events = [*recorded_events(recording), *annotations(recording)]
    return write_trace(directory / name, events, **top)


def recording_of(file: Machine) -> tracing.Recording:
    """What is in the file, as it is written for other tests too."""
    made, kept = tracing.Recording(), set(file.spans)
    for span in file.spans:
        place = span.name, span.start_ns, span.end_ns, tracing.PROCESS + span.thread
        args: Event = {"External id": span.operator} if span.operator else {}
        if span.kind == "call":
            made.calls.append(tracing.Call(*place, args))
            continue
        category, *numbers = TABLES["categories"][span.kind]
        args |= span.args | dict.fromkeys(numbers, span.number)
        if span.name.startswith("aten::"):
            args |= TABLES["shapes"]
        made.spans.append(tracing.Span(*place, category=category, args=args))
    for job in file.jobs:
        args = {key: job.args[key] for key in ("Collective name", "In msg nelems") if job.args}
        args |= {"External id": job.operator} if job.operator else {}
        launch_ns = job.launch.start_ns if job.launch in kept else None
        launched = launch_ns, tracing.PROCESS + job.launch.thread
        times = job.start_ns, job.end_ns - job.start_ns
        place = job.stream, job.number if job.is_in_graph else 0, job.device
        jobs = made.kernels if job.kind == "kernel" else made.copies
        jobs.append(tracing.Kernel(job.name, *launched, *times, *place, args))
    return made
