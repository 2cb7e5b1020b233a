"""Columns of the tables of explained profiles, of kernels and of memory, by key."""

from .column import Column, count_column, rounded_ms, text_column, three_digits
from .words import change, in_percent, label

# in each: heading, unit, explanation, and the order in which narrow terminals drop columns
OF_PROFILES: dict[str, Column] = {
    # kernels, per step
    "kernels_per_step": count_column("kernels", "Kernels that were launched.", 4),
    "kernel_mean_ms": rounded_ms("GPU time", "Durations of the kernels, added up."),
    "wall_mean_ms": rounded_ms(
        "wall", "Time on the device until the phase's last kernel has ended.", 1
    ),
    "busy_share": Column(
        "GPU busy", "%", "Part of the wall time in which a kernel or copy ran.", 2, write=in_percent
    ),
    "host_mean_ms": rounded_ms("CPU", "Time that the host was in the phase, waits included.", 5),
    "host_per_launch_s": Column(
        "CPU per launch", "µs", "The host's time in the phase, over its launches.", 6, scale=1e6
    ),
    "copies_per_step": count_column("copies", "Copies and fills by the driver.", 8),
    "recomputed_mean_ms": rounded_ms(
        "recomputed", "GPU time of forward that backward does again.", 7
    ),
    "clock_mean_ms": Column(
        "clock", "ms", "Time of the same phase in a run without a profiler.", 3
    ),
    "wall_over_clock": Column(
        "wall vs clock",
        "%",
        "By how much the wall time is longer than without a profiler.",
        5,
        write=change,
    ),
    "slowdown": Column(
        "slowdown",
        "times",
        "Time by the clock with a profiler over that without.",
        4,
        write=three_digits,
    ),
    "collective": text_column(
        "collective", "What the ranks do together; in a profile, all is all kinds at once."
    ),
    "collectives_per_step": count_column(
        "began", "Kernels of collectives, and copies to peers, that began there.", 4
    ),
    "collective_mean_ms": rounded_ms("collectives", "Time in which a kernel of a collective ran."),
    "overlapped_mean_ms": rounded_ms(
        "overlapped", "The part of it in which the device computed or copied too.", 3
    ),
    "exposed_mean_ms": rounded_ms(
        "exposed", "The part of it in which the device computed nothing."
    ),
    "exposed_share": Column(
        "of wall", "%", "The exposed part, over the phase's wall time.", 1, write=in_percent
    ),
    "rank": Column("rank", "", "Number of the process among those that share the step.", write=str),
    "waited_mean_ms": rounded_ms(
        "waited", "How long it waited in collectives for the rank that came last."
    ),
    "total_ms_per_step": rounded_ms("time", "Durations of these kernels, added up."),
    "count_per_step": count_column("launches", "Launches of these kernels."),
    "class": text_column("class", "What kind of work the kernels do, by their names."),
    "short_name": text_column(
        "kernel", "Name of the kernel without its template arguments.", write=label
    ),
    "mean_s": Column("mean", "µs", "Mean duration of one launch.", 4, scale=1e6),
    "median_s": Column("median", "µs", "Median duration of one launch.", 6, scale=1e6),
    "min_s": Column("min", "µs", "Shortest launch.", 8, scale=1e6),
    "max_s": Column("max", "µs", "Longest launch.", 7, scale=1e6),
    "std_s": Column("std", "µs", "Standard deviation of the launches' durations.", 5, scale=1e6),
    "of": text_column("of", "Forward, or the whole step."),
    "part": text_column("part", "Scores, softmax or values."),
    "share_of_phase": Column("of phase", "%", "Part of the phase's GPU time.", 4, write=in_percent),
    "products_ms_per_step": rounded_ms("matmuls", "GPU time of matrix multiplications.", 1),
    "scores_ms_per_step": rounded_ms("scores", "GPU time of the scores.", 4),
    "values_ms_per_step": rounded_ms("values", "GPU time of the weighted values.", 4),
    "softmax_ms_per_step": rounded_ms("softmax", "GPU time of the softmax."),
    "whole_ms_per_step": rounded_ms("all of attention", "GPU time of all kernels of attention.", 2),
    "time_ratio": Column(
        "time ratio", "", "Softmax over matrix multiplications, in time.", 3, write=three_digits
    ),
    "flops_ratio": Column(
        "FLOP ratio", "", "Softmax over matrix multiplications, in FLOPs.", 3, write=three_digits
    ),
    "time_per_flop_ratio": Column(
        "time per FLOP",
        "",
        "Softmax over matrix multiplications, in time per FLOP.",
        3,
        write=three_digits,
    ),
    "module": text_column("module", "Ranges around the launch, the outermost first."),
    "cause": text_column("cause", "Why the GPU had nothing to run."),
    "idle_ms_per_step": rounded_ms("idle", "Time in which no kernel or copy ran."),
    "share_of_wall": Column("of wall", "%", "Part of the step's wall time.", 1, write=in_percent),
    # memory
    "quantity": text_column("quantity", "What the value is of."),
    "category": text_column("category", "What the memory is used for.", 3),
    "bytes": Column("size", "", "Bytes in blocks of the allocator."),
    "requested_bytes": Column(
        "asked for", "", "Bytes that the program asked for; a block may be larger."
    ),
    "blocks": count_column("blocks", "Blocks of the allocator.", 2),
    "rounding_bytes": Column(
        "rounding",
        "",
        (
            "Part of the peak that was not asked for: a block is rounded up to "
            "512 bytes, and a rest of up to 1 MiB is not split off."
        ),
    ),
    "peak_requested_bytes": Column(
        "peak asked for", "", "The peak without rounding: what PyTorch's viewer draws."
    ),
    "held_bytes": Column("held throughout", "", "There before the recording and after it."),
    "reserved_at_peak_bytes": Column(
        "reserved at the peak", "", "Segments that PyTorch held then."
    ),
    "fragmentation_bytes": Column(
        "fragmentation",
        "",
        "Reserved at the peak and not allocated: cache, and the rests between blocks.",
    ),
    "private_bytes": Column(
        "private pools",
        "",
        "Reserved at the peak for CUDA graphs and others with a pool of their own.",
        5,
    ),
    "idle_private_bytes": Column(
        "private, in no block", "", "Of private pools, what no block used at the peak."
    ),
    "outside_bytes": Column(
        "outside of PyTorch",
        "",
        "Used on the device at the end: CUDA context, libraries, other processes.",
    ),
    "gpu_index": Column("device", "index", "Index of the GPU."),
    "recorded_steps": Column("steps", "steps", "Steps in the recording."),
    "flops": Column("work", "GFLOP", "FLOPs of the part.", 6, scale=1e-9),
    "peak_allocated_bytes": Column(
        "peak", "", "The most in blocks at any time, as torch.cuda.max_memory_allocated() counts."
    ),
    "peak_phase": text_column("in", "The phase in which memory was at its peak."),
    "predicted_peak_allocated_bytes": Column(
        "predicted", "", "The peak that the configuration was predicted to have.", 1
    ),
    "peak_reserved_bytes": Column(
        "reserved", "", "The most that PyTorch held in segments at any time.", 5
    ),
    "residual_stream_bytes": Column(
        "residual", "", "One tensor of batch x context x d_model in fp32.", 6
    ),
    "block_saved_bytes": Column(
        "saved per block", "", "What a typical block of the model saves for backward.", 2
    ),
    "block_gradient_bytes": Column(
        "gradients per block", "", "Gradients of a typical block of the model.", 4
    ),
    "step": Column("step", "", "Number of the recorded step, from 0.", write=str),
    "moment": text_column("moment", "When: the end of a phase, or the peak."),
    "time_s": Column("at", "ms", "Time from the first recorded event.", 4),
    "allocated_bytes": Column("allocated", "", "All categories together, in blocks."),
    "counted_bytes": Column("PyTorch's count", "", "What PyTorch's allocator itself counted.", 2),
    "reserved_bytes": Column("reserved", "", "Segments that PyTorch held then.", 3),
    "phase_peak_bytes": Column(
        "phase's peak", "", "The most that was allocated during the phase that ends here.", 2
    ),
    "count": count_column("count", "Allocations that are alike.", 2),
    "bytes_at_peak": Column("together", "", "Bytes of all of them at the peak, in blocks."),
    "share_of_peak": Column("share", "%", "Part of the peak.", 1, write=in_percent),
    "count_at_peak": count_column("count", "How many of them there were at the peak.", 2),
    "name": text_column("name", "Name of the tensor in the model.", write=label),
    "shape_and_type": text_column("shape", "Shape and data type of the tensor.", 7),
    "place": text_column("place", "The line of code that allocated it.", 6),
}
