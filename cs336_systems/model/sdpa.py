"""Which of the kernels of PyTorch's scaled dot product attention the model uses."""

from contextlib import AbstractContextManager, nullcontext

from torch.nn.attention import SDPBackend, sdpa_kernel

from cs336_systems.config import SdpaBackend

_BACKENDS = {
    SdpaBackend.FLASH: SDPBackend.FLASH_ATTENTION,
    SdpaBackend.CUDNN: SDPBackend.CUDNN_ATTENTION,
    SdpaBackend.EFFICIENT: SDPBackend.EFFICIENT_ATTENTION,
    SdpaBackend.MATH: SDPBackend.MATH,
}


def attention_backend(backend: SdpaBackend) -> AbstractContextManager[object]:
    """While open, PyTorch's fused attention uses this backend alone."""
    return nullcontext() if backend is SdpaBackend.AUTO else sdpa_kernel(_BACKENDS[backend])
