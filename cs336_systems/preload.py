"""What the fork server imports once for all workers: importing this is its whole use. It must not touch CUDA."""

import gc

import cs336_systems.cli
import cs336_systems.worker  # noqa: F401

gc.collect()
gc.freeze()
