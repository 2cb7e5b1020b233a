"""`cs336 cluster`: the machines of a Ray cluster, and what a sweep would do with them."""

import functools
import re
from dataclasses import dataclass
from typing import Annotated

import tyro

from cs336_systems.commands.device import DeviceChoice
from cs336_systems.commands.flags import Switch, unset
from cs336_systems.commands.outcome import FAILED, OK, UsageError, checked, json_alone

ANY_DEVICE = "that of the largest group of like machines"


@dataclass(frozen=True, kw_only=True)
class ClusterArguments:
    """Show the machines of a Ray cluster: their GPUs, the versions of what measures, what is free, and which of them a
    sweep with --cluster would leave out, and why.

    Nothing is measured, reserved or written. The status is 1 if a sweep could use no machine.
    """

    address: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ADDRESS")] = "auto"
    """HOST:PORT of the cluster's head; auto is the cluster that this machine belongs to."""
    device: Annotated[DeviceChoice, tyro.conf.arg(help="What would be measured; auto is GPUs if there are any.")] = (
        "auto"
    )
    require_device: Annotated[str | None, unset("NAME", ANY_DEVICE)] = None
    """As in a sweep: only machines whose device has this in its name, such as H200."""
    nsys: Switch = False
    """As in a sweep with --nsys: only machines that have nsys on their PATH."""
    json: Switch = False
    """Print JSON instead of a table."""


def check_address(address: str, what: str) -> None:
    """Raise ValueError for what is no address of a cluster; `what` names where it was given."""
    if not re.fullmatch(r"auto|(?!\w+://)\S+:\d+", address):
        raise ValueError(f"{what} needs auto or HOST:PORT, as `ray status` shows it; got {address[:120]!r}")


def check_ray(what: str) -> None:
    """Raise UsageError, which says what to install for `what`, where Ray is missing."""
    from cs336_systems.sweep.cluster.ray_nodes import is_installed

    if not is_installed():
        raise UsageError(f'{what} needs Ray: pip install "cs336-systems-benchmark[cluster]"')


def run(arguments: ClusterArguments) -> int:
    """Print the table of machines."""
    checked(functools.partial(check_address, arguments.address, "cs336 cluster"))
    check_ray("cs336 cluster")
    from cs336_systems.files import encode_json
    from cs336_systems.report.sections.cluster import cluster_section
    from cs336_systems.report.status_line import StatusLine
    from cs336_systems.report.terminal import print_table
    from cs336_systems.sweep.cluster import ray_nodes
    from cs336_systems.sweep.cluster.conditions import Conditions, refusals

    with json_alone(arguments.json) as print_json:
        with StatusLine() as status:
            status("asking the machines of the cluster")
            look = ray_nodes.look(arguments.address, arguments.device)
        conditions = Conditions(require_device=arguments.require_device, needs_nsys=arguments.nsys)
        refused = refusals(look, conditions)
        section = cluster_section(look, refused)
        if print_json is not None:
            print_json(encode_json({"address": arguments.address, "device": look.device, "machines": section.json}))
        else:
            print_table(section.tables[0])
    return OK if None in refused.values() else FAILED
