"""Which codec stores each (layer, kv head, role) of a model, and what a context costs
(kvant/scheme.h)."""

from __future__ import annotations

import ctypes as c
import os

from . import checks
from . import structs as s
from .codec import Codec, ExactPart, step_bytes, tensor_bytes
from .library import MAX_HEAD_DIM, PAGE_TOKENS, ROLES, Owned, c_text, facts, invoke


class Scheme(Owned):
    """The codecs of a model's cache: a preset; or specs k and v, where one alone is for both roles;
    or the path of a settings file. The default is the preset "balanced". `calibration`: the path of
    a calibration. A settings file names its calibration. model, the path of the model's file, finds
    a calibration next to it that was made with this very file. `like`: a scheme whose calibration
    is used again without reading it. `protect`: this many first and last layers use protect_codec
    ("f16" by default). The model's shape is given by name. Error with the library's words for
    arguments that do not fit together.

    Any number of caches and threads may share a scheme."""

    preset: str | None
    k: str | None  #: specs of ordinary layers; None with a settings file
    v: str | None
    protect: int
    calibrated: bool  #: it has a calibration
    needs_calibration: bool  #: some codec could not be made without it
    calibration_path: (
        str | None
    )  #: named, or found next to the model; None: none, or the settings file's own
    not_used: str | None  #: why the calibration next to the model is not used

    def __init__(
        self,
        preset: str | None = None,
        k: str | None = None,
        v: str | None = None,
        settings: str | os.PathLike[str] | None = None,
        calibration: str | os.PathLike[str] | None = None,
        protect: int = 0,
        protect_codec: str | None = None,
        seed: int = 0,
        model: str | os.PathLike[str] | None = None,
        like: Scheme | None = None,
        *,
        n_layers: int,
        n_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
    ) -> None:
        super().__init__("kvant_scheme_free", like)
        self.n_layers = checks.count(n_layers, "n_layers")
        self.n_kv_heads = checks.count(n_kv_heads, "n_kv_heads")
        self.head_dim = checks.count(head_dim, "head_dim", most=MAX_HEAD_DIM)
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        self.v_head_dim = checks.count(v_head_dim, "v_head_dim", most=MAX_HEAD_DIM)
        texts = {"preset": preset, "k": k, "v": v, "settings": settings, "calibration": calibration}
        texts |= {"protect_codec": protect_codec, "model": model}
        made = s.SchemeParams.new(
            **{name: c_text(value, name) for name, value in texts.items()},
            protect=checks.count(protect, "protect", least=0),
            seed=checks.count(seed, "seed", least=0, most=2**64 - 1),
            like=checks.handle(like, "like", "kvant_scheme_free"),
        )
        invoke("scheme", "kvant_scheme_create", made, self._handle)
        found = facts("scheme info", "kvant_scheme_get_info", s.SchemeInfo, self._handle)
        del found["settings"]
        self.calibrated = found.pop("calibration") is not None
        self.__dict__.update(found)

    def codecs(self, layer: int, role: str) -> list[Codec]:
        """The codecs of a layer, one per kv head. They keep the scheme alive."""
        number = checks.count(layer, "layer", least=0, most=self.n_layers - 1)
        location = s.SchemeLocation.new(
            role=checks.role(role),
            layer=number,
            n_layers=self.n_layers,
            n_kv_heads=self.n_kv_heads,
            head_dim=self.head_dim if role == "k" else self.v_head_dim,
        )
        found = c.POINTER(c.c_void_p)()
        what = f"layer {layer}, {'keys' if role == 'k' else 'values'}"
        invoke(what, "kvant_scheme_codecs", self._handle, location, found)
        return [Codec.borrowed(found[head], self) for head in range(self.n_kv_heads)]

    def specs(self, layer: int, role: str) -> tuple[str, ...]:
        """The canonical specs of a layer, one per kv head."""
        return tuple(codec.spec for codec in self.codecs(layer, role))

    @property
    def true_bits(self) -> float:
        """Bits per number of the keys and values of all layers, every stored byte counted."""
        dims, bits = (c.c_uint32 * 2)(self.head_dim, self.v_head_dim), c.c_double()
        model = s.SchemeModel.new(n_layers=self.n_layers, n_kv_heads=self.n_kv_heads, head_dim=dims)
        invoke("bits of the scheme", "kvant_scheme_true_bits", self._handle, model, c.byref(bits))
        return bits.value

    def exact(self, max_tokens: int, n_sequences: int = 1) -> ExactPart:
        """The part of a cache on a CPU that stays fp16. It is the first and the newest tokens of
        each sequence, at most a sixteenth of max_tokens, and the rows of a step. Zeros if specs
        chose the codecs."""
        part = s.ExactPart.new()
        tokens = checks.count(max_tokens, "max_tokens", least=0)
        sequences = checks.count(n_sequences, "n_sequences")
        invoke("exact part", "kvant_scheme_exact", self._handle, tokens, sequences, part)
        return ExactPart(part.first, part.newest, part.total, part.step)

    def context_bytes(self, n_tokens: int, n_sequences: int = 1) -> int:
        """Memory of a kvant.Cache on a CPU for n_tokens tokens of all sequences together. It counts
        pages, the fp16 blocks of the exact part and of the codecs, and the rows of a step, whose
        memory layers share."""
        n_blocks, total = -(-checks.count(n_tokens, "n_tokens") // PAGE_TOKENS), 0
        exact = self.exact(n_tokens, n_sequences)
        n_blocks += n_sequences - 1  # each sequence may end in a block that is not full
        for role, head_dim in zip(ROLES, (self.head_dim, self.v_head_dim)):
            total += step_bytes(n_blocks, self.n_kv_heads * head_dim) if exact.step else 0
            for layer in range(self.n_layers):
                total += tensor_bytes(self.codecs(layer, role), n_sequences, n_blocks, exact)
        return total

    def __repr__(self) -> str:
        return f"<kvant.Scheme {self.preset or self.k}: {self.true_bits:.2f} bits per number>"
