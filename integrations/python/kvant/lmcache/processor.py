"""The classes that LMCache calls."""

from __future__ import annotations

from typing import Any

import torch
from lmcache.v1.distributed.serde import AsyncSerdeProcessor, Deserializer, Serializer

from ..arrays import np
from . import options
from .container import Damaged
from .serde import Serde


def _memory(obj: Any) -> np.ndarray:
    """All bytes of a buffer that LMCache made for a serialized object."""
    return obj.tensor.reshape(-1).view(torch.uint8).numpy()


def _tensors(obj: Any) -> list[torch.Tensor]:
    n = len(obj.get_shapes())
    return [obj.tensor] if n == 1 else [obj.get_tensor(i) for i in range(n)]


class KvantSerializer(Serializer):  # type: ignore[misc]
    def __init__(self, serde: Serde) -> None:
        self._serde = serde

    def serialize(self, src: Any, dst: Any, key: Any) -> int:
        return self._serde.encode(_tensors(src), _memory(dst), key)

    def estimate_serialized_size(self, layout_desc: Any) -> int:
        return self._serde.size(layout_desc.shapes, layout_desc.dtypes)


class KvantDeserializer(Deserializer):  # type: ignore[misc]
    def __init__(self, serde: Serde) -> None:
        self._serde = serde

    def deserialize(self, src: Any, dst: Any, key: Any) -> None:
        try:
            self._serde.decode(_memory(src), _tensors(dst), key)
        except Damaged as error:
            name = f"{key.model_name} {key.kv_rank:#010x} {key.chunk_hash.hex()}"
            raise Damaged(
                f"kvant: object {name} is not used, which counts as a miss: {error}"
            ) from None


class Processor(AsyncSerdeProcessor):  # type: ignore[misc]
    """LMCache loads and stores each object in one task; the serde's threads share the layers of an
    object."""

    def __init__(self, serde: Serde) -> None:
        super().__init__(KvantSerializer(serde), KvantDeserializer(serde), max_workers=2)
        self._serde = serde

    def close(self) -> None:
        super().close()
        self._serde.close()


def processor(words: dict[str, Any]) -> Processor:
    return Processor(Serde(options.read(words)))
