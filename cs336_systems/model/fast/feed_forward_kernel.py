"""Matmuls of QuACK (github.com/Dao-AILab/quack) whose epilogue is GELU or SwiGLU, or multiplies by
its slopes.

QuACK writes the matmul, with the tensor cores and bulk copies of a Hopper GPU; this module writes
what happens to the result before it leaves the registers. An epilogue is traced, so it may not call
functions of this module.
"""

from typing import Any

import torch
from torch import Tensor

from .compiled_ahead import keep_kernels
from .fused_blocks_kernel import summed
from .packages import without_compiler

keep_kernels("fused_activations")  # the package reads where when it is imported

with without_compiler():
    from quack.activation import dgelu_tanh_approx, dswiglu
    from quack.epilogue.frontend import gemm_epilogue
    from quack.epilogue.math import unpack
    from quack.epilogue.ops import RowVecReduce
    from quack.gemm_config import GemmConfig

TILE_ROWS, TILE_COLUMNS = 128, (192, 160, 128)
"""Rows of a tile of the result, and the numbers of columns that there may be."""
FIXED_COLUMNS = 32
"""As many columns take the time that a tile takes besides that of its columns."""


def _tiles(rows: int, columns: int, device: torch.device) -> GemmConfig:
    """Tiles of a result: those with which all processors are done first, if each computes one tile
    after the other.

    Two neighbours, with the same columns or the same rows, share what they load. Two groups of
    warps take turns: one multiplies while the other computes its epilogue. On an H100, in the
    shapes of small, medium, xl, gpt2 and gpt2-xl, forward and backward, the choice lost at most 3 %
    to the best of TILE_COLUMNS.
    """
    processors = torch.cuda.get_device_properties(device).multi_processor_count

    def time(width: int) -> int:
        """Time of all tiles of this width, in that of one column of a tile."""
        tiles = -(-rows // TILE_ROWS) * -(-columns // width)
        return -(-tiles // processors) * (width + FIXED_COLUMNS)

    width = min(TILE_COLUMNS, key=time)
    shares_rows = width == min(TILE_COLUMNS)
    return GemmConfig(
        tile_m=TILE_ROWS,
        tile_n=width,
        pingpong=True,
        cluster_m=1 if shares_rows else 2,
        cluster_n=2 if shares_rows else 1,
        is_dynamic_persistent=False,
    )


def expand(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The kernel of `_expand` in packed.py."""
    x = x.contiguous()
    tiles = _tiles(len(x), len(weight), x.device)
    slopes = x.new_empty(len(x), len(weight))
    if bias is not None:
        hidden = torch.empty_like(slopes)
        _gelu(
            x,
            weight.t(),
            out={"D": slopes, "hidden": hidden},
            bias=bias[None],
            config=tiles,
            tuned=False,
        )
        return slopes, hidden
    width = len(weight) // 2
    hidden = x.new_empty(len(x), width)
    # rows of the two factors are taken in turn, so that a thread has both factors of an element
    _swiglu(
        x,
        weight.t(),
        out={"of_gate": slopes[:, :width], "of_up": slopes[:, width:], "hidden": hidden},
        store_d=False,
        concat_layout=("B",),
        config=tiles,
        tuned=False,
    )
    return slopes, hidden


def contract_backward(
    gradient: Tensor, weight: Tensor, slopes: Tensor, bias_type: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """The kernel of `_contract_backward` in packed.py."""
    gradient, result = gradient.contiguous(), torch.empty_like(slopes)
    rows, width = len(gradient), weight.shape[1]
    tiles = _tiles(rows, width, gradient.device)
    if bias_type is not None:
        partial = gradient.new_empty(1, -(-rows // TILE_ROWS), width, dtype=torch.float32)
        _gelu_backward(
            gradient,
            weight,
            slopes,
            out={"D": result},
            of_bias=partial[0],
            config=tiles,
            tuned=False,
        )
        return result, summed(partial, bias_type)[1]
    _swiglu_backward(
        gradient,
        weight,
        out={"D": result[:, :width], "of_up": result[:, width:]},
        gate_slope=slopes[:, :width],
        up_slope=slopes[:, width:],
        config=tiles,
        tuned=False,
    )
    return result, slopes.new_empty(0, dtype=torch.float32)


# `acc` is the matmul's result in fp32, `c` the third tensor of the call, and "D" the result that is
# stored. QuACK's derivatives return that of the input, times a gradient (here 1), and last the
# activation itself.


# Forward of GELU: the slope of the activation at acc + bias, and the activation.
@gemm_epilogue(outputs=("hidden",))
def _gelu(acc: Any, bias: Any) -> dict[str, Any]:
    slope, hidden = dgelu_tanh_approx(acc + bias, 1.0)
    return {"D": slope, "hidden": hidden}


# Backward of GELU: `c` is the slope, so the result is the gradient of the preactivation, whose sum
# over the rows is the gradient of the bias.
@gemm_epilogue(reduces={"of_bias": RowVecReduce("of_bias")})
def _gelu_backward(acc: Any, c: Any) -> dict[str, Any]:
    of_x = acc * c
    return {"D": of_x, "of_bias": of_x}


# Forward of SwiGLU: `acc` holds gate and up in pairs; the slopes along both, and the activation.
@gemm_epilogue(outputs=("of_gate", "of_up", "hidden"), mode="acc_pair")
def _swiglu(acc: Any) -> dict[str, Any]:
    gate, up = unpack(acc)
    of_gate, of_up, hidden = dswiglu(gate, up, 1.0)
    return {"of_gate": of_gate, "of_up": of_up, "hidden": hidden}


# Backward of SwiGLU: the gradients of gate and up, from that of the activation and both slopes.
@gemm_epilogue(outputs=("of_up",))
def _swiglu_backward(acc: Any, gate_slope: Any, up_slope: Any) -> dict[str, Any]:
    return {"D": acc * gate_slope, "of_up": acc * up_slope}
