"""The body of an object: for each layer a record of its keys, then a record of its values
(docs/reference/format.md, "Records"). These are the records that the C API exports and imports, so
kvant_tensor_import_record reads a layer of an object. Any bytes are safe to read."""

from __future__ import annotations

import ctypes as c
from typing import Any, Iterator, NamedTuple, Sequence

from .. import structs as s
from ..arrays import np
from ..library import PAGE_TOKENS, invoke, library
from ..tensor import Tensor
from .container import Damaged
from .layout import Layout

_UNKNOWN = -(2**31)  # the position of a block
_CHECKSUM = 8  # bytes at the end of a record


class Found(NamedTuple):
    """A record that was checked."""

    codes: list[int]  #: by block: the address of its pages
    center: np.ndarray | None  #: float32 [kv heads, head_dim]
    scale: np.ndarray | None


class Records:
    """`own`: for each role, whether chunks have a separate center and a separate scale. Any number
    of threads may use an object of this class at once."""

    def __init__(
        self, layout: Layout, codecs: Sequence[Sequence[Any]], own: Sequence[tuple[bool, bool]]
    ) -> None:
        self._shape, self._own = (layout.n_kv_heads, layout.head_dim), own
        self._numbers = layout.n_kv_heads * layout.head_dim
        self._forms = [[Tensor(heads) for heads in layer] for layer in codecs]
        self._slots = [
            2 ** min(PAGE_TOKENS, layout.n_tokens - first) - 1
            for first in range(0, layout.n_tokens, PAGE_TOKENS)
        ]
        none = (None, None)
        self.sizes = [self._size(self._open(0, role, none)[0], role) for role in (0, 1)]
        self.size = len(codecs) * sum(self.sizes)

    def _size(self, record: s.OuterRecord, role: int) -> int:
        size = c.c_size_t()
        invoke(
            "record", "kvant_tensor_outer_size", self._forms[0][role].handle, record, c.byref(size)
        )
        return size.value

    def _open(
        self, layer: int, role: int, affine: Sequence[np.ndarray | None]
    ) -> tuple[s.OuterRecord, Any]:
        form = self._forms[layer][role].handle
        blocks = (s.OuterBlock * len(self._slots))(
            *(s.OuterBlock(slots=slots, written=slots, position=_UNKNOWN) for slots in self._slots)
        )
        numbers = [None if x is None else np.ascontiguousarray(x, np.float32) for x in affine]
        transform = c.create_string_buffer(8 + 4 * self._numbers)  # zeros: no center and no scale
        if any(self._own[role]):
            library().kvant_tensor_half_transform(
                form, *(None if x is None else x.ctypes.data for x in numbers), transform
            )
        record = s.OuterRecord(
            blocks=blocks,
            n_blocks=len(blocks),
            n_transforms=1,
            transforms=(c.c_void_p * 1)(c.addressof(transform)),
        )
        record.keep = transform
        return record, blocks

    def place(self, body: np.ndarray, layer: int, role: int) -> np.ndarray:
        """The bytes of a record in a body."""
        first = layer * sum(self.sizes) + role * self.sizes[0]
        return body[first : first + self.sizes[role]]

    def write(
        self,
        body: np.ndarray,
        layer: int,
        role: int,
        affine: Sequence[np.ndarray | None],
        pages: Iterator[np.ndarray],
    ) -> None:
        """Writes a record. `pages`: of each block, one after another."""
        to, form = self.place(body, layer, role), self._forms[layer][role].handle
        record, blocks = self._open(layer, role, affine)
        at = to.ctypes.data
        invoke("record", "kvant_tensor_outer_begin", form, record, at, to.size)
        for block, page in zip(blocks, pages):
            c.memmove(block.codes, page.ctypes.data, page.size)
        invoke("record", "kvant_tensor_outer_end", form, record, at, to.size)

    def read(self, body: np.ndarray, layer: int, role: int) -> Found:
        """Checks a record. Damaged or kvant.Error if it is not as it was written."""
        of, n = self.place(body, layer, role), len(self._slots)
        form = self._forms[layer][role].handle
        slots = (s.BlockSlots * n)(*(s.BlockSlots(slots=x, block=0) for x in self._slots))
        blocks, transforms = (s.OuterBlock * n)(), (c.c_void_p * s.MAX_TRANSFORMS)()
        invoke(
            "record",
            "kvant_tensor_read_outer",
            form,
            slots,
            n,
            of.ctypes.data,
            of.size,
            0,
            blocks,
            transforms,
        )
        if transforms[1] or any(b.exact or b.shift or not b.codes for b in blocks):
            raise Damaged("a record has other blocks than an object's")
        size = library().kvant_tensor_transform_bytes(form, transforms[0])
        if size != 8 + any(self._own[role]) * 4 * self._numbers:
            raise Damaged("a record has another transform than an object's")
        return Found([b.codes for b in blocks], *self._affine(role, transforms[0]))

    def _affine(self, role: int, transform: int) -> Iterator[np.ndarray | None]:
        n = self._numbers
        for i, wanted in enumerate(self._own[role]):
            numbers = None
            if wanted:
                halves = np.frombuffer(c.string_at(transform + 8 + 2 * n * i, 2 * n), np.float16)
                numbers = halves.astype(np.float32).reshape(self._shape)
            yield numbers

    def checksums(self, body: np.ndarray) -> bytes:
        """The checksums of all records, one after another."""
        return b"".join(
            self.place(body, layer, role)[-_CHECKSUM:].tobytes()
            for layer in range(len(self._forms))
            for role in (0, 1)
        )
