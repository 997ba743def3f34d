"""Codecs on the CPU: rows of float32 to page bytes and back, and what each codec is
(kvant/codec.h)."""

from __future__ import annotations

import ctypes as c
from typing import TYPE_CHECKING, Any, NamedTuple, Sequence

from . import checks
from . import structs as s
from .library import MAX_HEAD_DIM, PAGE_TOKENS, Owned, c_text, check, facts, invoke, library

if TYPE_CHECKING:
    import numpy as np

    from .calibration import Calibration

_STEP_ROWS = 512  # KVANT_EXACT_STEP
_CENTERS = {0: "none", 1: "first", 2: "file"}


class CodecFamily(NamedTuple):
    """A family of codecs. `variants` are the texts that may follow the dash of a spec ("2", "3",
    "s96r4"), or () when nothing does. `options` belong to this family; it shares common_options
    with other families."""

    name: str
    variants: tuple[str, ...]
    options: str
    common_options: str
    source: str
    summary: str

    @property
    def specs(self) -> tuple[str, ...]:
        """The specs of all variants, one for each line of `kvant codecs --all`."""
        return tuple(f"{self.name}-{variant}" for variant in self.variants) or (self.name,)


def codecs() -> list[CodecFamily]:
    """All families, in the order in which `kvant codecs` lists them."""
    families = []
    for index in range(library().kvant_codec_family_count()):
        plain = facts("codec family", "kvant_codec_family_get", s.CodecFamily, index)
        families.append(CodecFamily(**plain | {"variants": tuple(plain["variants"].split())}))
    return families


def check_spec(spec: str, role: str = "k", calibration: Calibration | None = None) -> None:
    """Error with the library's words when spec makes a codec for no head_dim that models use. A
    spec that passes may still be refused for the head_dim of a model."""
    known = checks.handle(calibration, "calibration", "kvant_calibration_free")
    what, name = f"codec {spec!r}", c_text(checks.text(spec, "spec"), "spec")
    invoke(what, "kvant_codec_check", name, checks.role(role), known)


def needs_calibration(spec: str, role: str = "k") -> bool:
    """Whether codecs of this spec and role use a calibration. Error for a spec that makes no
    codec."""
    needed = c.c_int()
    what, name = f"codec {spec!r}", c_text(checks.text(spec, "spec"), "spec")
    invoke(what, "kvant_codec_needs_calibration", name, checks.role(role), c.byref(needed))
    return bool(needed.value)


class Codec(Owned):
    """A codec of one kv head: spec as in codecs.md, role "k" or "v".

    Specs that use a calibration need one, and then belong to (layer, kv_head). The codec copies the
    calibration's numbers that it needs. Error with the library's words for a spec that it refuses.

    A codec never changes: any number of threads may use it at once."""

    spec: str  #: canonical
    source: str  #: the paper and section, or "-"
    head_dim: int
    role: str
    center: str  #: the source of a cache's centre: "none", "first" rows or "file"
    norm: str  #: the same of the scale
    sink_tokens: int  #: first tokens of a sequence that a cache keeps as fp16
    recent_tokens: int  #: newest tokens that it keeps as fp16
    block_tokens: int  #: encode takes whole blocks of this many tokens
    bits: int  #: bits of one code
    code_bytes: int
    metadata_offset: int
    metadata_bytes: int
    page_bytes: int
    true_bits: float  #: per number, every stored byte counted
    nominal_bits: float  #: per number, as the paper counts
    fingerprint: int  #: equal fingerprints: equal bytes

    def __init__(
        self,
        spec: str,
        head_dim: int,
        role: str = "k",
        calibration: Calibration | None = None,
        layer: int = 0,
        kv_head: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__("kvant_codec_free")
        invoke(
            f"codec {spec!r}",
            "kvant_codec_create_calibrated",
            c_text(checks.text(spec, "spec"), "spec"),
            checks.count(head_dim, "head_dim", most=MAX_HEAD_DIM),
            checks.role(role),
            checks.count(seed, "seed", least=0, most=2**64 - 1),
            checks.handle(calibration, "calibration", "kvant_calibration_free"),
            checks.count(layer, "layer", least=0),
            checks.count(kv_head, "kv_head", least=0),
            self._handle,
        )
        self._read_info()
        self._made = (
            None if calibration is not None else (self.spec, head_dim, role, None, 0, 0, seed)
        )

    _made: tuple[Any, ...] | None = None  # arguments for making it again in another process

    def __reduce__(self) -> Any:
        if self._made is None:
            raise TypeError(
                "a codec that a calibration, a cache or a scheme made cannot be copied or pickled"
            )
        return type(self), self._made

    @classmethod
    def owning(cls, pointer: int) -> Codec:
        """A codec that the library made."""
        codec = cls.__new__(cls)
        Owned.__init__(codec, "kvant_codec_free")
        codec._handle.value = pointer
        codec._read_info()
        return codec

    @classmethod
    def borrowed(cls, pointer: int, owner: object) -> Codec:
        """A codec that owner has (kvant.Scheme). It keeps owner alive."""
        codec = cls.__new__(cls)
        Owned.__init__(codec, "", owner)
        codec._handle.value = pointer
        codec._read_info()
        return codec

    def _read_info(self) -> None:
        plain = facts("codec info", "kvant_codec_get_info", s.CodecInfo, self._handle)
        plain["role"] = "kv"[plain["role"]]
        self.__dict__.update(plain | {name: _CENTERS[plain[name]] for name in ("center", "norm")})

    def __repr__(self) -> str:
        return f"kvant.Codec({self.spec!r}, {self.head_dim}, {self.role!r})"

    def _affine(self, center: Any, scale: Any) -> tuple[object, object]:
        """The structure, and the arrays that it points to."""
        from . import arrays

        kept = [
            arrays.channels(x, what, (self.head_dim,))
            for x, what in ((center, "center"), (scale, "scale"))
        ]
        return c.byref(s.Affine(*map(arrays.pointer, kept))), kept

    def encode(self, rows: Any, center: Any = None, scale: Any = None) -> np.ndarray:
        """Encodes rows [n, head_dim] float32, of NumPy or with DLPack on the CPU, into pages: a new
        uint8 array [ceil(n / 64), page_bytes].

        Row i is token i % 64 of page i // 64. n is a multiple of block_tokens. When n is not a
        multiple of 64, the tokens after the last row are zero bytes, as in a page that was never
        written. `center` and `scale` are float32 [head_dim]. The codec subtracts center from rows
        and then divides them by scale. ValueError or TypeError for another shape or dtype; Error of
        status 50 for a NaN or an infinity, 51 for a row beyond fp16's range."""
        from . import arrays

        rows, stride = arrays.rows(rows, "rows", (None, self.head_dim))
        if rows.shape[0] % self.block_tokens:
            raise ValueError(
                f"rows: {self.spec} takes whole blocks of {self.block_tokens} tokens, "
                f"not {rows.shape[0]} rows"
            )
        affine, kept = self._affine(center, scale)
        n, encode, handle = rows.shape[0], library().kvant_codec_encode, self._handle
        pages = arrays.zeroed(-(-n // PAGE_TOKENS) * self.page_bytes).reshape(-1, self.page_bytes)
        at, step, to = rows.ctypes.data, 4 * stride * PAGE_TOKENS, pages.ctypes.data
        # For small codecs a call takes 10 to 20 us, so nothing unnecessary is computed here.
        for first in range(0, n, PAGE_TOKENS):
            here = PAGE_TOKENS if n - first > PAGE_TOKENS else n - first
            status = encode(handle, affine, at, stride, 0, here, to)
            if status:
                check(f"rows {first} to {first + here - 1}", status)
            at += step
            to += self.page_bytes
        return pages

    def decode(
        self, pages: Any, n: int | None = None, center: Any = None, scale: Any = None
    ) -> np.ndarray:
        """Decodes the first n rows of pages, by default all 64 rows of each page: a new float32
        array [n, head_dim].

        pages are uint8 [pages, page_bytes]; center and scale are the arguments that encode had. Any
        bytes are a valid page: bytes of another codec give numbers without meaning, infinities and
        NaNs included."""
        from . import arrays

        pages = self._readable(pages)
        most = PAGE_TOKENS * pages.shape[0]
        n = most if n is None else checks.count(n, "n", least=0, most=most)
        affine, kept = self._affine(center, scale)
        rows, decode = arrays.np.empty((n, self.head_dim), "float32"), library().kvant_codec_decode
        for first in range(0, n, PAGE_TOKENS):
            source = pages.ctypes.data + first // PAGE_TOKENS * self.page_bytes
            to = rows.ctypes.data + 4 * self.head_dim * first
            status = decode(
                self._handle, affine, source, 0, min(PAGE_TOKENS, n - first), to, self.head_dim
            )
            if status:
                check("decode", status)
        return rows

    def transform_queries(self, queries: np.ndarray, scale: np.ndarray | None = None) -> np.ndarray:
        """R (q o s) of each query, float32 [n, head_dim]: a new array of the same shape. `scale`:
        as for encode."""
        from . import arrays

        queries = arrays.contiguous(queries, "queries", "float32", (None, self.head_dim))
        out, (affine, kept) = arrays.np.empty_like(queries), self._affine(None, scale)
        for i in range(queries.shape[0]):
            at = 4 * self.head_dim * i
            pair = queries.ctypes.data + at, out.ctypes.data + at
            invoke("transform", "kvant_codec_transform_query", self._handle, affine, *pair)
        return out

    def scores(
        self, queries: np.ndarray, pages: np.ndarray, scale: np.ndarray | None = None
    ) -> np.ndarray:
        """<query, token> of every query, float32 [n, head_dim], and every token of pages, computed
        on their codes: a new float32 array [n, 64 * pages]. The centre's term is left out, as
        softmax ignores it. Tokens that were never encoded score 0."""
        from . import arrays

        queries, pages = self.transform_queries(queries, scale), self._readable(pages)
        n = queries.shape[0]
        found = arrays.np.empty((pages.shape[0], n, PAGE_TOKENS), "float32")
        rows = queries.ctypes.data, self.head_dim, n
        for i in range(pages.shape[0] if n else 0):
            page, to = pages.ctypes.data + i * self.page_bytes, found[i].ctypes.data
            invoke("scores", "kvant_codec_score", self._handle, page, *rows, to)
        return found.transpose(1, 0, 2).reshape(n, PAGE_TOKENS * pages.shape[0])

    def _readable(self, pages: np.ndarray) -> np.ndarray:
        """Returns pages, or a copy when they are not aligned to 16 bytes."""
        from . import arrays

        pages = arrays.contiguous(pages, "pages", "uint8", (None, self.page_bytes))
        if pages.ctypes.data % 16 == 0:
            return pages
        aligned = arrays.zeroed(pages.size).reshape(pages.shape)
        aligned[:] = pages
        return aligned


class ExactPart(NamedTuple):
    """The tokens that a cache keeps as fp16, whatever its codecs are (Scheme.exact)."""

    first: int  #: first tokens of each sequence, a multiple of 64
    newest: int  #: newest tokens of each sequence
    total: int  #: most tokens of all sequences together
    step: int  #: rows of a write that stay fp16 until the next write


def tensor_params(
    codecs: Sequence[Codec],
    n_sequences: int,
    n_blocks: int,
    blocks_per_sequence: int,
    n_open_blocks: int,
    block_stride: int = 0,
    exact: ExactPart | None = None,
) -> s.TensorParams:
    """Makes kvant_tensor_params. The struct keeps the arrays that it points to alive, but not the
    codecs."""
    if not codecs or not all(isinstance(codec, Codec) for codec in codecs):
        raise TypeError("codecs: a kvant.Codec per kv head is needed")
    handles = (c.c_void_p * len(codecs))(*(codec.handle for codec in codecs))
    return s.TensorParams.new(
        codecs=handles,
        n_kv_heads=len(codecs),
        n_sequences=checks.count(n_sequences, "n_sequences"),
        n_blocks=checks.count(n_blocks, "n_blocks"),
        blocks_per_sequence=checks.count(blocks_per_sequence, "blocks_per_sequence", least=0),
        n_open_blocks=checks.count(n_open_blocks, "n_open_blocks", least=0),
        block_stride=checks.count(block_stride, "block_stride", least=0),
        exact=None if exact is None else c.pointer(s.ExactPart.new(**exact._asdict())),
    )


def tensor_bytes(codecs: Sequence[Codec], n_sequences: int, n_blocks: int, exact: ExactPart) -> int:
    """Memory of the keys or the values of a layer in a cache on a CPU: pages, and fp16 blocks
    (kvant_tensor_size). The rows of a step lie in memory that layers share: step_bytes."""
    made, size = tensor_params(codecs, n_sequences, n_blocks, 0, 0, exact=exact), c.c_size_t()
    made.steps = c.pointer(s.StepPages.new())
    invoke("size", "kvant_tensor_size", made, c.byref(size))
    return size.value


def step_bytes(n_blocks: int, width: int) -> int:
    """Memory for the rows of a step in a cache on a CPU. The keys of all layers share it, and so do
    the values of all layers; a cache without an exact part has none. `width`: numbers of a token's
    row, all kv heads together."""
    return min(n_blocks * PAGE_TOKENS, _STEP_ROWS) * width * 2
