"""A mock of PyTorch for tests without PyTorch: tensors with shapes, strides, dtypes and devices,
without memory.
"""

import contextlib
import types

float32 = "torch.float32"
float16 = "torch.float16"
bfloat16 = "torch.bfloat16"
float64 = "torch.float64"
uint8, int32, int64 = "torch.uint8", "torch.int32", "torch.int64"
contiguous_format = "contiguous"
_BYTES = {float32: 4, float16: 2, bfloat16: 2, float64: 8, uint8: 1, int32: 4, int64: 8}


class device:
    def __init__(self, name):
        name = str(name)
        self.type = name.split(":")[0]
        self.index = (
            int(name.split(":")[1]) if ":" in name else (0 if self.type == "cuda" else None)
        )

    def __eq__(self, other):
        return isinstance(other, device) and (self.type, self.index) == (other.type, other.index)

    def __str__(self):
        return self.type if self.index is None else f"{self.type}:{self.index}"


class Tensor:
    _next = 1 << 20

    def __init__(self, shape, dtype, on="cuda", strides=None, values=()):
        self.shape, self.dtype, self.device, self.values = tuple(shape), dtype, device(on), values
        contiguous, size = [], 1
        for n in reversed(self.shape):
            contiguous.insert(0, size)
            size *= n
        self._strides = tuple(contiguous if strides is None else strides)
        self._address = Tensor._next
        Tensor._next += (size * _BYTES[dtype] + 511) // 256 * 256
        self._size = size

    def stride(self, dim=None):
        return self._strides if dim is None else self._strides[dim]

    def data_ptr(self):
        return self._address

    def numel(self):
        return self._size

    def min(self):
        return min(self.values)

    def max(self):
        return max(self.values)


def zeros(*shape, dtype, device):  # noqa: A002
    return Tensor(shape, dtype, device)


empty = zeros


def empty_like(tensor, memory_format):
    return Tensor(tensor.shape, tensor.dtype, tensor.device)


cuda = types.SimpleNamespace(
    device=lambda which: contextlib.nullcontext(),
    is_current_stream_capturing=lambda: False,
    current_stream=lambda: types.SimpleNamespace(cuda_stream=77),
)
