"""Prepares arguments for calls of libkvant's GPU side: codecs there, the arrays that a calibration
gives them, and the stream."""

from __future__ import annotations

import contextlib
import ctypes as c
from typing import Any, Callable, Iterator, Sequence

import torch
from torch import Tensor

from . import checks
from .codec import Codec
from .library import PAGE_TOKENS, Owned, invoke
from .rope import Rope
from .structs import CodecInfo, CudaQueryArgs, CudaTables

_TYPES = {"float32": 0, "float16": 1, "bfloat16": 2}  # kvant_cuda_type
_LEARNT_TOGETHER = 512  # KVANT_EXACT_STEP: rows, as a cache writes them
SCRATCH_ROWS = 384  # KVANT_CUDA_SCRATCH_ROWS
SCRATCH_BYTES = 129 << 20  # KVANT_CUDA_SCRATCH_BYTES


def type_of(tensor: Tensor) -> int:
    return _TYPES[checks.name_of(tensor.dtype)]


def pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@contextlib.contextmanager
def calls(device: torch.device) -> Iterator[Callable[[str, Any], None]]:
    """Yields run(name, arguments), which calls kvant_cuda_NAME on the current stream of a GPU. On a
    CPU it calls the mock of the tests."""
    on_gpu = device.type != "cpu"
    with torch.cuda.device(device) if on_gpu else contextlib.nullcontext():
        stream = torch.cuda.current_stream().cuda_stream if on_gpu else None
        yield lambda name, arguments: invoke(name, f"kvant_cuda_{name}", arguments, stream)


def call(name: str, arguments: Any, device: torch.device) -> None:
    with calls(device) as run:
        run(name, arguments)


def query_fields(
    codec: GpuCodec, q: Tensor, inverse: int | None, n_kv_heads: int, out: Tensor
) -> dict[str, Any]:
    """The fields of CudaQueryArgs that multiply queries [n, heads, head_dim] by the matrix of
    transform=file into out: float32, contiguous."""
    return dict(
        k_codec=codec.handle,
        batch=q.shape[0],
        n_heads=q.shape[1],
        n_kv_heads=n_kv_heads,
        type=type_of(q),
        q=q.data_ptr(),
        q_batch_stride=q.stride(0),
        q_head_stride=q.stride(1),
        inverse_key_transform=inverse,
        out=out.data_ptr(),
    )


def transform_queries(
    codec: GpuCodec, q: Tensor, inverse: int | None, n_kv_heads: int, out: Tensor
) -> Tensor:
    """Multiplies queries as query_fields says."""
    arguments = CudaQueryArgs.new(**query_fields(codec, q, inverse, n_kv_heads, out))
    call("transform_queries", arguments, q.device)
    return out


class GpuCodec(Owned):
    """The GPU's side of a codec."""

    def __init__(self, make: str, what: str, source: Any) -> None:
        super().__init__("kvant_cuda_codec_free")
        invoke(what, make, source, self._handle)
        info = CodecInfo.new()
        invoke("codec info", "kvant_cuda_codec_get_info", self._handle, info)
        self.page_bytes = info.page_bytes

    @classmethod
    def of(cls, codec: Codec) -> GpuCodec:
        return cls("kvant_cuda_codec_from", f"codec {codec.spec!r}", codec.handle)

    def open(self) -> GpuCodec:
        """Makes the codec of fp16 pages whose rows this codec will quantise."""
        return GpuCodec("kvant_cuda_codec_create_open", "open codec", self._handle)


def tables(codec: Codec) -> Any:
    """The arrays that a calibration gives a codec, which owns them."""
    found = CudaTables.new()
    invoke("tables", "kvant_cuda_codec_tables", codec.handle, found)
    return found


def learn(like: Codec, keys: Tensor, queries: Tensor, rope: Rope | None = None) -> list[Codec]:
    """Makes codecs, one per kv head, from one with transform=first. Each has the centre and the
    matrix that a cache on the CPU learns from the first tokens of a sequence. Keys are [n, kv
    heads, head_dim] and queries [n, heads, head_dim]. `rope`: how RoPE rotates both."""
    from .tensor import Tensor as Rows

    quick = Codec(
        f"int-8:transform=first,rotate=none,sink={like.sink_tokens}", like.head_dim
    )  # and learns the same
    k, q = (x.detach().to("cpu", torch.float32).contiguous() for x in (keys, queries))
    rows = Rows([quick] * k.shape[1], n_blocks=-(-len(k) // PAGE_TOKENS))
    at = torch.arange(len(k), device="cpu")
    rows.set_rope(
        None if rope is None else rope._replace(n_position_transforms=1)
    )  # a matrix for all positions
    for part in zip(
        k.split(_LEARNT_TOGETHER), q.split(_LEARNT_TOGETHER), at.split(_LEARNT_TOGETHER)
    ):
        here, asked, slots = (x.numpy() for x in part)
        rows.note_queries(asked)
        rows.write(slots, here)
    return [rows.make_codec(rows.n_blocks - 1, head, like) for head in range(k.shape[1])]


class Numbers:
    """The arrays that a calibration gives the codecs of one role, each [layers, kv heads, n] on a
    GPU; None where it gives nothing."""

    def __init__(self, codecs: Sequence[Sequence[Codec]], device: torch.device) -> None:
        """codecs: per layer one per kv head."""
        self._found, self._device = [[tables(codec) for codec in layer] for layer in codecs], device
        first, dim = self._found[0][0], codecs[0][0].head_dim
        self.key_transform_size = first.key_transform_size
        self.center, self.scale = self._gather("center", dim), self._gather("scale", dim)
        self.key_transform, self.inverse_key_transform = (
            self._gather(name, first.key_transform_size)
            for name in ("key_transform", "inverse_key_transform")
        )
        self.centroids = self._gather("centroids", first.n_centroids)
        pivots, columns = self._gather("pivots", dim), self._gather("columns", dim * dim)
        self.feedback = (
            None
            if pivots is None or columns is None
            else torch.cat([pivots, columns], 2).contiguous()
        )
        del self._found

    def _gather(self, name: str, n: int) -> Tensor | None:
        if not n or not getattr(self._found[0][0], name):
            return None
        # The type and the device are named, because vLLM sets others as the defaults.
        made = torch.empty(
            len(self._found), len(self._found[0]), n, dtype=torch.float32, device="cpu"
        )
        for layer, row in zip(made, self._found):
            for head, table in zip(layer, row):
                c.memmove(head.data_ptr(), getattr(table, name), 4 * n)
        return made.to(self._device)

    @property
    def any(self) -> bool:
        return any(
            x is not None
            for x in (self.center, self.scale, self.key_transform, self.centroids, self.feedback)
        )
