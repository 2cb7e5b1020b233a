"""Flags with which a run launches fewer kernels, without those that it uses already.

If the configuration is unknown, as that of another program's trace, the advice names no flags and leaves open which are
in use.
"""

from enum import Enum

from cs336_systems.config import Attention, CompileMode, Mode, OptimizerKind, Precision, RunConfig

NOT_IN_USE = "where not in use yet"


class Remedy(Enum):
    """A way to launch fewer kernels: in words, and as this project's flag."""

    COMPILE = ("torch.compile", "--compile default")
    ATTENTION = ("fused attention", "--attention sdpa")
    OPTIMIZER = ("a fused optimizer", "--optimizer fused")
    GRAPHS = ("CUDA graphs", "--compile reduce-overhead")

    def named_for(self, config: RunConfig | None) -> str:
        """The flag; the words if the configuration is unknown."""
        words, flag = self.value
        return words if config is None else flag

    def is_open_to(self, config: RunConfig | None) -> bool:
        """Whether the run could use it and does not; True if the configuration is unknown.

        Flags cannot change the attention of a user's own model.
        """
        if config is None:
            return True
        return {
            Remedy.COMPILE: config.compile is CompileMode.NONE,
            Remedy.ATTENTION: config.model_factory is None and config.model.attention is Attention.NAIVE,
            Remedy.OPTIMIZER: config.mode is Mode.TRAIN and config.optimizer is not OptimizerKind.FUSED,
            Remedy.GRAPHS: not config.cuda_graph and config.compile is not CompileMode.REDUCE_OVERHEAD,
        }[self]


_PRECISIONS = {
    Precision.TF32: ('TF32 (torch.set_float32_matmul_precision("high"))', "--precision tf32"),
    Precision.BF16: ("autocast to bf16", "--mixed-precision"),
    Precision.FP16: ("autocast to fp16", "--precision fp16"),
}


def use_of(precision: Precision, config: RunConfig | None) -> str:
    """How to compute matmuls in that precision: the flag; if the configuration is unknown, PyTorch's function."""
    words, flag = _PRECISIONS[precision]
    return words if config is None else flag


def remedies(config: RunConfig | None, *candidates: Remedy) -> str:
    """The candidates that are open to the run, separated by commas; empty if there are none."""
    found = [remedy.named_for(config) for remedy in candidates if remedy.is_open_to(config)]
    return ", ".join([*found, NOT_IN_USE] if config is None else found)


def against_launches(config: RunConfig | None) -> str:
    """What helps if launching kernels limits the step, as a phrase that follows `use`."""
    ways = ["a larger model or batch"]
    if kernels := remedies(config, Remedy.COMPILE, Remedy.ATTENTION, Remedy.OPTIMIZER):
        ways.append(f"fewer kernels ({kernels})")
    if graphs := remedies(config, Remedy.GRAPHS):
        ways.append(f"CUDA graphs {NOT_IN_USE}" if config is None else f"CUDA graphs ({graphs})")
    return ", or ".join([", ".join(ways[:-1]), ways[-1]] if len(ways) > 1 else ways)
