"""The codecs that store a layout, and the offsets of their pages in a body."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Iterator, NamedTuple

from ..calibration import Calibration
from ..codec import Codec
from ..gpu import tables
from ..library import Error
from ..scheme import Scheme
from . import container
from .layout import RAW, Layout, align
from .options import Options
from .records import Records

ROLES = "kv"
LOG = logging.getLogger("lmcache.kvant")  # LMCache's handlers print it


class Place(NamedTuple):
    """One kv head of a layer and role."""

    role: int
    head: int
    codec: Any  #: handles for the library
    center: int | None  #: a calibration's numbers, which the codec owns
    scale: int | None
    page: int  #: where its page begins among the pages of a role


@dataclass(frozen=True)
class Stored:
    """`codecs`: for each layer and role one codec per kv head."""

    layout: Layout
    codecs: tuple[tuple[tuple[Codec, ...], tuple[Codec, ...]], ...]
    fingerprint: int
    specs: str

    @cached_property
    def own(self) -> tuple[tuple[bool, bool], ...]:
        """For each role, whether chunks have a separate center and a separate scale."""
        first = (self.codecs[0][role][0] for role in (0, 1)) if self.codecs else ()
        return tuple((codec.center == "first", codec.norm == "first") for codec in first)

    @cached_property
    def records(self) -> Records:
        return Records(self.layout, self.codecs, self.own)

    @cached_property
    def page_sizes(self) -> tuple[int, int]:
        k, v = self.codecs[0]
        return k[0].page_bytes, v[0].page_bytes

    @cached_property
    def block_size(self) -> int:
        return self.layout.n_kv_heads * sum(self.page_sizes)

    @cached_property
    def size(self) -> int:
        """Bytes of header and body."""
        if self.layout.kind == RAW:
            return container.HEADER + align(self.layout.bytes, 8)
        return container.HEADER + self.records.size

    @cached_property
    def places(self) -> tuple[tuple[Place, ...], ...]:
        """The places of each layer."""
        return tuple(tuple(self._places(layer)) for layer in self.codecs)

    def _places(self, layer: tuple[tuple[Codec, ...], ...]) -> Iterator[Place]:
        for role, codecs in enumerate(layer):
            page = 0
            for head, codec in enumerate(codecs):
                of = tables(codec)
                yield Place(role, head, codec.handle, of.center, of.scale, page)
                page += codec.page_bytes

    def header(self, key: bytes) -> bytes:
        return container.header(self.layout, self.size, self.fingerprint, key, self.specs)


class Codecs:
    """Makes codecs and keeps them. Any number of threads may call it."""

    def __init__(self, options: Options) -> None:
        self._options, self._lock = options, threading.Lock()
        self._calibration = Calibration(options.calibration).info if options.calibration else None
        self._found: dict[tuple[Layout, int], Stored] = {}
        info = self._calibration
        shape = (
            (info.n_layers, info.n_kv_heads, info.head_dim) if info else (1, 1, options.head_dim)
        )
        self._scheme(*shape).codecs(0, "k")  # errors of the configuration, before the server begins
        self._scheme(*shape).codecs(0, "v")

    def _scheme(self, n_layers: int, n_kv_heads: int, head_dim: int) -> Scheme:
        chosen = self._options
        words = {"preset": chosen.preset} if chosen.preset else {"k": chosen.k, "v": chosen.v}
        return Scheme(
            **words,
            calibration=chosen.calibration,
            n_layers=n_layers,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
        )

    def of(self, layout: Layout, kv_rank: int = 0) -> Stored:
        """How a layout is stored. `kv_rank`: from LMCache's key. A layout that the codecs cannot
        store is kept as raw bytes, because an error here would end LMCache's threads."""
        with self._lock:
            found = self._found.get((layout, kv_rank))
            if found is None:
                found = self._found[layout, kv_rank] = self._make(layout, kv_rank)
            return found

    def _make(self, layout: Layout, kv_rank: int) -> Stored:
        if layout.kind != RAW:
            try:
                return self._compressed(layout, kv_rank)
            except (Error, ValueError) as error:
                LOG.warning(
                    "kvant: objects of shape %s are stored uncompressed: %s", layout.shape, error
                )
                return self.of_raw(layout)
        LOG.warning(
            "kvant: objects of shape %s and dtype %s are stored uncompressed: no keys and values",
            layout.shape,
            layout.dtype,
        )
        return self.of_raw(layout)

    @staticmethod
    def of_raw(layout: Layout) -> Stored:
        return Stored(layout._replace(kind=RAW, n_kv_heads=0, head_dim=0), (), 0, "raw")

    def _compressed(self, layout: Layout, kv_rank: int) -> Stored:
        first, n_heads = self._share(layout, kv_rank)
        scheme = self._scheme(layout.n_layers, n_heads, layout.head_dim)
        found = tuple(
            tuple(
                tuple(scheme.codecs(layer, role)[first : first + layout.n_kv_heads])
                for role in ROLES
            )
            for layer in range(layout.n_layers)
        )
        for codec in found[0][0][0], found[0][1][0]:
            if layout.n_tokens % codec.block_tokens:
                raise ValueError(
                    f"{codec.spec} takes {codec.block_tokens} tokens at once, and a chunk has "
                    f"{layout.n_tokens}"
                )
        prints = tuple(codec.fingerprint for layer in found for role in layer for codec in role)
        fingerprint = int.from_bytes(container.digest(prints, size=8), "little")
        made = Stored(
            layout, found, fingerprint, " ".join(found[0][role][0].spec for role in (0, 1))
        )
        made.records  # an error is the layout's
        return made

    def _share(self, layout: Layout, kv_rank: int) -> tuple[int, int]:
        """The first kv head of a rank, and the model's number of kv heads. A kv_rank holds the
        world size and the rank in 8 bits each, and 16 further bits."""
        info, world, rank = self._calibration, max(1, kv_rank >> 24), kv_rank >> 16 & 255
        if info is None:
            return 0, layout.n_kv_heads
        if layout.n_layers != info.n_layers or info.n_kv_heads % layout.n_kv_heads or rank >= world:
            shape = f"{layout.n_layers} layers of {layout.n_kv_heads} kv heads"
            raise ValueError(
                f"the calibration is for {info.n_layers} layers of {info.n_kv_heads} kv heads, not "
                f"{shape}"
            )
        return min(
            rank * info.n_kv_heads // world, info.n_kv_heads - layout.n_kv_heads
        ), info.n_kv_heads
