"""What the fork server imports once for all workers that measure. It must not touch CUDA."""

import cs336_systems.sweep.server  # isort: skip
import cs336_systems.sweep.worker  # noqa: F401
