"""AdamW on many tensors in one launch, written in Triton; each tensor is read once and written
once.

A weight with a low-precision gradient and copy takes 28 bytes of memory traffic per parameter: the
master, both moments and the gradient are read (14), the master, both moments and the copy are
written (14). Moments in bf16, rounded at random (see `_rounded`), reduce that to 20. A split master
(weights.py) takes 2 bytes less, as its copy is a part of it. The same kernel finds the largest
magnitude of each copy if asked to.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .fused_blocks_kernel import magnitude
from .weights import NAN_BITS, READ_BYTES

CHUNK = 1024
"""Elements of one program: 4.09 TB/s on an H200, which copies at 4.26; more are a little slower."""
NUM_WARPS = 4
NAN: tl.constexpr = tl.constexpr(NAN_BITS)


@triton.jit
def _adamw_chunks(
    pointers,
    sizes,
    chunk_tensors,
    chunk_numbers,
    steps,
    lr,
    beta1,
    beta2,
    eps,
    decay,
    HAS_COPY: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_LARGEST: tl.constexpr,
    NUM_WIDE: tl.constexpr,
    NUM_NARROW: tl.constexpr,
    NARROW_MOMENTS: tl.constexpr,
    CHUNK: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Update one chunk of CHUNK elements of one tensor per program.

    Program i updates chunk `chunk_numbers[i]` of tensor `chunk_tensors[i]`. A row of `pointers` has
    a tensor's addresses, in the order of `ChunkedAdamW`'s columns, and `sizes` its number of
    elements; `steps` is one element. Each tensor has NUM_WIDE gradients in fp32 and NUM_NARROW in
    bf16. A tensor's last chunk is updated in pieces of PIECE elements.
    """
    number = tl.program_id(0)
    tensor = tl.load(chunk_tensors + number)
    start = tl.load(chunk_numbers + number).to(tl.int64) * CHUNK
    size = tl.load(sizes + tensor)
    row = pointers + tensor * (5 + NUM_WIDE + NUM_NARROW)
    step = tl.load(steps)
    correction1 = 1 - tl.exp(step * tl.log(beta1))
    correction2 = 1 - tl.exp(step * tl.log(beta2))
    seed = _mixed(_mixed(step.to(tl.uint32)) + tensor.to(tl.uint32))
    scalars = correction1, correction2, lr, beta1, beta2, eps, decay
    # A masked load reads element by element, so only a tensor's last chunk is masked. That chunk is
    # updated in small pieces: otherwise the masked code would need more registers, which all
    # programs would have to reserve.
    if start + CHUNK <= size:
        _update(
            row,
            start,
            size,
            seed,
            scalars,
            HAS_COPY,
            IS_SPLIT,
            HAS_LARGEST,
            NUM_WIDE,
            NUM_NARROW,
            NARROW_MOMENTS,
            CHUNK,
            False,
        )
    else:
        for piece in range(start, size, PIECE):
            _update(
                row,
                piece,
                size,
                seed,
                scalars,
                HAS_COPY,
                IS_SPLIT,
                HAS_LARGEST,
                NUM_WIDE,
                NUM_NARROW,
                NARROW_MOMENTS,
                PIECE,
                True,
            )


@triton.jit
def _update(
    row,
    start,
    size,
    seed,
    scalars,
    HAS_COPY: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_LARGEST: tl.constexpr,
    NUM_WIDE: tl.constexpr,
    NUM_NARROW: tl.constexpr,
    NARROW_MOMENTS: tl.constexpr,
    SIZE: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Update SIZE elements from `start` on: load, add up the gradients, apply AdamW, store."""
    correction1, correction2, lr, beta1, beta2, eps, decay = scalars
    offsets = tl.arange(0, SIZE)
    inside = offsets < size - start if IS_MASKED else None
    if HAS_COPY:
        copy_at = _elements(row, 3, tl.bfloat16, start, offsets)
    if IS_SPLIT:
        rest_at = _elements(row, 0, tl.int16, start, offsets)
        upper = tl.load(copy_at, mask=inside).to(tl.int16, bitcast=True).to(tl.int32) << 16
        master = (upper + tl.load(rest_at, mask=inside).to(tl.int32)).to(tl.float32, bitcast=True)
    else:
        master_at = _elements(row, 0, tl.float32, start, offsets)
        master = tl.load(master_at, mask=inside)
    moments: tl.constexpr = tl.bfloat16 if NARROW_MOMENTS else tl.float32
    first_at = _elements(row, 1, moments, start, offsets)
    second_at = _elements(row, 2, moments, start, offsets)

    gradient = tl.zeros([SIZE], tl.float32)
    for number in tl.static_range(5, 5 + NUM_WIDE):
        gradient += tl.load(_elements(row, number, tl.float32, start, offsets), mask=inside)
    for number in tl.static_range(5 + NUM_WIDE, 5 + NUM_WIDE + NUM_NARROW):
        narrow_at = _elements(row, number, tl.bfloat16, start, offsets)
        gradient += tl.load(narrow_at, mask=inside).to(tl.float32)

    master *= 1 - lr * decay
    first = beta1 * tl.load(first_at, mask=inside).to(tl.float32) + (1 - beta1) * gradient
    second = (
        beta2 * tl.load(second_at, mask=inside).to(tl.float32) + (1 - beta2) * gradient * gradient
    )
    master -= lr / correction1 * first / (tl.sqrt(second / correction2) + eps)

    if NARROW_MOMENTS:
        noise = _mixed((start + offsets).to(tl.uint32) ^ seed)
        tl.store(first_at, _rounded(first, noise & 0xFFFF), mask=inside)
        tl.store(second_at, _rounded(second, noise >> 16), mask=inside)
    else:
        tl.store(first_at, first, mask=inside)
        tl.store(second_at, second, mask=inside)
    if IS_SPLIT:  # as weights.split_values does
        bits = tl.where(master == master, master.to(tl.int32, bitcast=True), NAN)
        copy = ((bits + 0x8000) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        tl.store(rest_at, bits.to(tl.int16), mask=inside)
    else:
        copy = master.to(tl.bfloat16)
        tl.store(master_at, master, mask=inside)
    if HAS_COPY:
        tl.store(copy_at, copy, mask=inside)
        if HAS_LARGEST:
            sizes = magnitude(copy, copy_at)
            sizes = tl.where(inside, sizes, 0.0) if IS_MASKED else sizes
            largest_at = tl.load(row + 4).to(tl.pointer_type(tl.float32))
            tl.atomic_max(largest_at, tl.max(sizes, 0), sem="relaxed")


@triton.jit
def _elements(row, column, DTYPE: tl.constexpr, start, offsets):
    """Pointers to the elements start + offsets of the tensor whose address is in this column."""
    tensor = tl.load(row + column).to(tl.pointer_type(DTYPE))
    return tl.multiple_of(tensor, 16) + start + offsets


@triton.jit
def _rounded(values, noise):
    """Round fp32 values to bf16 stochastically, so that they are right on average; NaN stays NaN.

    `noise`, from 0 to 2^16 - 1, is added to the 16 bits that bf16 lacks, which are then cut off.
    """
    bits = values.to(tl.uint32, bitcast=True) + noise
    bits = tl.where(values == values, bits, NAN)  # the sum could carry NaN's bits over to 0
    return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _mixed(bits):
    """32 bits that look random: the last step of MurmurHash3 (Appleby 2011)."""
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35
    return bits ^ (bits >> 16)


class ChunkedAdamW:
    """Update of tensors of one kind: all with or all without a copy, and with gradients of the same
    types.

    `masters` are in fp32; or, if all are split, they are the remainders (weights.py). A tensor's
    gradient is the fp32 sum of those given; bf16 ones come last. Only gradients may move between
    steps, and not in a CUDA graph: call `upload` once after its capture. `largest` is empty or has
    one fp32 element per copy, which gets its largest magnitude. The moments are all in fp32 or all
    in bf16.
    """

    def __init__(
        self,
        masters: Sequence[Tensor],
        firsts: Sequence[Tensor],
        seconds: Sequence[Tensor],
        copies: Sequence[Tensor],
        largest: Sequence[Tensor],
        gradient_types: Sequence[torch.dtype],
    ) -> None:
        """Cut all tensors into chunks, and put sizes and addresses into tables on the device."""
        self._is_split = masters[0].dtype is torch.int16
        device = masters[0].device
        sizes = torch.tensor([master.numel() for master in masters])
        chunks = (sizes + CHUNK - 1) // CHUNK
        first_chunks = chunks.cumsum(0) - chunks
        tensors = torch.repeat_interleave(torch.arange(len(masters)), chunks)
        numbers = torch.arange(int(chunks.sum())) - first_chunks[tensors]
        self._sizes = sizes.to(device)
        self._tensors, self._numbers = (
            table.to(device, torch.int32) for table in (tensors, numbers)
        )
        self._has_copy, self._largest = bool(copies), list(largest)
        self._narrow_moments = firsts[0].dtype is torch.bfloat16
        self._num_narrow = sum(dtype is torch.bfloat16 for dtype in gradient_types)
        self._num_wide = len(gradient_types) - self._num_narrow
        nothing = torch.zeros(len(masters), dtype=torch.int64)
        # columns: master or remainder, first moment, second moment, copy, largest, gradients
        columns = [_addresses(tensors) for tensors in (masters, firsts, seconds)]
        for optional in (copies, largest):
            columns.append(_addresses(optional) if optional else nothing)
        columns += [nothing for _ in gradient_types]
        self._pointers = torch.stack(columns, dim=1)
        self._on_device = self._pointers.to(device)

    def __call__(
        self,
        gradients: Sequence[Sequence[Tensor]],
        steps: Tensor,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        """Update with each tensor's gradients; `steps` is this step's number, on the device."""
        self._place(gradients)
        if self._largest:
            # the programs take the maximum of this and of their chunks
            torch._foreach_zero_(self._largest)
        _adamw_chunks[(len(self._tensors),)](
            self._on_device,
            self._sizes,
            self._tensors,
            self._numbers,
            steps,
            lr,
            *betas,
            eps,
            weight_decay,
            HAS_COPY=self._has_copy,
            IS_SPLIT=self._is_split,
            HAS_LARGEST=bool(self._largest),
            NUM_WIDE=self._num_wide,
            NUM_NARROW=self._num_narrow,
            NARROW_MOMENTS=self._narrow_moments,
            CHUNK=CHUNK,
            PIECE=32 * NUM_WARPS,
            num_warps=NUM_WARPS,
        )

    def _place(self, gradients: Sequence[Sequence[Tensor]]) -> None:
        """Note the gradients' addresses; upload changed ones, unless in a capture."""
        addresses = torch.stack(
            [_addresses(column) for column in zip(*gradients, strict=True)], dim=1
        )
        if (addresses % READ_BYTES).any():
            raise RuntimeError(
                f"the kernel needs gradients that start at a multiple of {READ_BYTES} bytes, and "
                "one does not"
            )
        if not torch.equal(self._pointers[:, 5:], addresses):
            self._pointers[:, 5:] = addresses
            if not torch.cuda.is_current_stream_capturing():
                self.upload()

    def upload(self) -> None:
        """Copy the gradients' addresses to the device."""
        self._on_device.copy_(self._pointers)


def _addresses(tensors: Sequence[Tensor]) -> Tensor:
    """Where each tensor begins in memory."""
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64)
