"""What each command's help begins with: three ways to call it."""

EXAMPLES = {
    "benchmark": (
        "--size small --context-length 512 --mixed-precision",
        "--profile",
        "--model mine:make --memory",
    ),
    "sweep": (
        "--mixed-precision",
        "--sizes small medium --context-lengths 128 512 --profile",
        "--sizes xl --modes inference train --memory",
    ),
    "compare": (
        '"--attention naive" "--attention sdpa"',
        "data/e2e_benchmark/before data/e2e_benchmark/after",
        "before.json.gz after.json.gz",
    ),
    "ladder": ("--size gpt2", "--size small --repeats 5", "--size gpt2-xl --dry-run"),
    "attention": (
        "",
        "--own flash:FlashAttention",
        "--causal --precisions bf16 --d-heads 64 128 --context-lengths 1024 16384",
    ),
    "fusion": ("", "--precisions bf16", "--name before"),
    "precision": ("", "--device cpu", "--output data/precision"),
    "ceilings": ("", "--step-presets small xl", "--device cpu --world-size 2"),
    "kernels": ("trace.json.gz", "report.nsys-rep", "traces_of_all_ranks --output explained"),
    "memory": ("snapshot.pickle", "snapshot.pickle --device 1", "snapshot.pickle --json"),
    "report": ("data", "data/e2e_benchmark/single --open", "trace.json.gz --open"),
    "account": (
        "--size xl --context-length 1024 --device-name H100",
        "--size 2.7B --mixed-precision --fit --device-name H100",
        "--model mine:make --details",
    ),
    "plan": (
        "--size 8B --tokens 1T --gpus 64xH100",
        "--size 8B --gpus 2x8xH100 --price 2.5",
        "--size 10B --gpus 8xH200 --global-batch 4M",
    ),
}
"""Arguments, by the name of the command."""


def examples_of(command: str, prog: str) -> list[str]:
    """The lines of the command's examples; `prog` is what its help calls it."""
    program = f"python {prog}" if prog.endswith(".py") else prog
    return [f"  {program} {arguments}".rstrip() for arguments in EXAMPLES[command]]
