"""The Hopper GPU for which steps are traced and compiled where there is none: an H100 of 80 GB."""

from types import SimpleNamespace

HOPPER = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=80 * 2**30,
    regs_per_multiprocessor=65_536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    shared_memory_per_block=48 * 2**10,
    shared_memory_per_block_optin=227 * 2**10,
    shared_memory_per_multiprocessor=228 * 2**10,
    L2_cache_size=50 * 2**20,
    gcnArchName="",
)
"""Its properties, by the names of torch.cuda.get_device_properties."""
OF_THE_KIND = ("name", "major", "minor", "multi_processor_count", "warp_size")
"""Properties that a step may ask for: other Hopper GPUs have the same, but for the name."""
