"""KvantCache: the compressed cache for past_key_values= of transformers.

It makes the stores and acts on all layers at once. layer.py has a single layer of it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from .. import checks, system, torch as operators
from ..cache import Cache as Pages
from ..codec import needs_calibration
from ..scheme import Scheme
from ..settings import Settings, preset as find_preset
from . import saving
from .fingerprint import calling_module, fingerprint, is_plain
from .layer import KvantLayer, window_of
from .rope import rope_of
from .store import Store


class KvantCache(Cache):
    """The keys and values of a model, compressed: for past_key_values= of generate and of models.

    The codecs come from a preset ("balanced" by default), or specs k and v (one alone is for both),
    or a settings file of kvant tune. `calibration` is the path of a .kvcal. Load the model with
    attn_implementation="kvant" for attention on the pages. Every other implementation works, too,
    and decodes the whole cache in each step.

    Layers of another kind than attention with a full or a sliding window stay as transformers has
    them. `max_tokens`: tokens of all sequences together, by default the model's longest context for
    each. A CPU's memory is taken when it is used. A GPU's memory is taken at once, by default at
    most half of the free memory. `max_sequences`: sequences of this cache and of its copies
    together (copy.deepcopy shares blocks). `n_threads`: PyTorch's number by default. `exact`:
    attention without rounding queries and weights to 16-bit integers, several times slower; on the
    CPU.

    Padding on the left is not stored: give every call the mask of the whole sequence."""

    def __init__(
        self,
        config: Any,
        preset: str | None = None,
        *,
        k: str | None = None,
        v: str | None = None,
        settings: str | os.PathLike[str] | None = None,
        calibration: str | os.PathLike[str] | None = None,
        max_tokens: int | None = None,
        max_sequences: int | None = None,
        n_threads: int | None = None,
        exact: bool = False,
    ) -> None:
        if not hasattr(config, "get_text_config"):
            raise TypeError(
                f"config: a model's config is needed (model.config), not {type(config).__name__}"
            )
        if getattr(config, "is_encoder_decoder", False):
            raise ValueError(
                "config: models with an encoder are not supported: use a cache of transformers"
            )
        self.config = config.get_text_config(decoder=True)
        self.exact = exact
        self._stored: dict[str, Any] = dict(
            preset=preset, k=k, v=v, settings=settings, calibration=calibration
        )
        for name, number in dict(
            max_tokens=max_tokens, max_sequences=max_sequences, n_threads=n_threads
        ).items():
            if number is not None:
                checks.count(number, name)
        self._limits = max_tokens, max_sequences, n_threads
        self._weights = 0  # fingerprint in the calibration or saved cache, until it was compared
        self._seen_weights: int | None = (
            None  # fingerprint of the model in use; 0: its weights cannot be read
        )
        self._check()
        self._stores: dict[Any, Store] = {}
        self._keeps_past = False
        self._schemes: dict[Any, Scheme] = {}
        self._starts: tuple[list[int], Tensor] | None = None  # of the sequences, on the GPU
        self._wrong: Tensor | None = None  # whether a mask of this round was wrong
        self._together: set[int] = set()  # layers that had the first layer's tokens
        self._new = 0  # tokens that this pass adds
        layers: list[Any] = []
        for number, layer in enumerate(DynamicCache(config=config).layers):
            window = window_of(layer)
            layers.append(layer if window is None else KvantLayer(self, number, window))
        super().__init__(layers=layers)
        self._warn_of_others()

    def _check(self) -> None:
        """Checks everything that is known before the first rows: names, files, and the number of
        layers."""
        given = {name: value for name, value in self._stored.items() if value is not None}
        if len({"specs" if name in "kv" else name for name in given if name != "calibration"}) > 1:
            raise ValueError(f"{', '.join(given)}: give a preset, or specs k and v, or settings")
        if "preset" in given:
            find_preset(given["preset"])
        for role in ("k", "v"):
            if (
                role in given
                and needs_calibration(given[role], role)
                and "calibration" not in given
            ):
                raise ValueError(
                    f"{role}: {given[role]} needs calibration=, a file that kvant.calibrate makes"
                )
        if self._stored["settings"] is not None:
            found = Settings.load(self._stored["settings"]).info.n_layers
            if found != self.config.num_hidden_layers:
                raise ValueError(
                    f"settings: they are for a model of {found} layers, not "
                    f"{self.config.num_hidden_layers}: make them with kvant.tune"
                )
        if self._stored["calibration"] is not None:
            from ..calibration import Calibration

            info = Calibration(self._stored["calibration"]).info
            if info.n_layers != self.config.num_hidden_layers:
                raise ValueError(
                    f"calibration: it is for a model of {info.n_layers} layers, not "
                    f"{self.config.num_hidden_layers}: make one with kvant.calibrate"
                )
            self._weights = info.model_fingerprint

    def _warn_of_others(self) -> None:
        others = [layer for layer in self._others() if isinstance(layer, CacheLayerMixin)]
        kept = len(self.layers) - len(self._others())
        if others or not kept:
            kinds = ", ".join(sorted({type(layer).__name__ for layer in self._others()}))
            warnings.warn(
                f"KvantCache compresses {kept} of {len(self.layers)} layers of "
                f"{self.config.model_type}: transformers stores the "
                f"other layers uncompressed ({kinds})",
                stacklevel=3,
            )

    def check_weights(self) -> None:
        """Checks whether the calibration, or a saved cache, belongs to the weights of the model. A
        layer's update calls it, and the module that called update has the weights. A model calls
        its first layer first, whose weights calibrations and saved caches know."""
        if self._seen_weights is not None:
            return
        module = calling_module()
        if module is None:  # no model made these keys: the first model decides
            return
        found = fingerprint(module) if self._weights or is_plain(module) else 0
        if self._weights and found != self._weights:
            raise ValueError(
                "calibration: it is for a model of the same shape with other weights (a fine-tune, "
                "an adapter, or a file of "
                "llama.cpp): make one with kvant.calibrate"
                if self._stored["calibration"]
                else "KvantCache: it was saved with a model of the same shape with other weights"
            )
        self._seen_weights = found

    # Functions for layers

    def begin_pass(self, layer: KvantLayer, n: int) -> None:
        """Called for each layer of a pass of n tokens. RuntimeError if a call that failed has left
        this layer, or some layer that had as many tokens as the first, behind the first layer."""
        first = next((x for x in self._ours() if x.is_initialized), layer)
        if layer is first:
            length = first.get_seq_length()
            lengths = {x.number: x.get_seq_length() for x in self._ours() if x.is_initialized}
            least = min((lengths[number] for number in self._together), default=length)
            self._together = {number for number, own in lengths.items() if own == length}
            self._new = n
        else:  # layers of cross-attention have another number of tokens
            length = first.get_seq_length()
            least = 0 if not layer.is_initialized and length > n == self._new else length
        if least != length:
            raise RuntimeError(
                f"KvantCache: a call that failed left layers with {least} of {length} tokens: "
                "crop the tokens of that call, or begin a new cache"
            )

    @property
    def wants_tensors(self) -> bool:
        """Whether the model's attention accepts only plain tensors, because it is compiled or is
        not PyTorch's."""
        return str(getattr(self.config, "_attn_implementation", "")).startswith(("flex", "flash"))

    def _store_of(self, layer: KvantLayer, k: Tensor, v: Tensor) -> Store:
        """Makes a store, which has memory for all layers with the same window."""
        key = layer.window, k.shape[1], k.shape[3], v.shape[3], k.device
        if key not in self._stores:
            same = [
                x.number
                for x in self.layers
                if isinstance(x, KvantLayer) and x.window == layer.window
            ]
            self._stores[key] = Store(layer.window, self._keeps_past, same)
        return self._stores[key]

    @staticmethod
    def _on_gpu(rows: Tensor) -> bool:
        return rows.device.type == "cuda"

    def _make(self, k: Tensor, v: Tensor, layers: list[int]) -> tuple[Pages, int, Tensor]:
        max_tokens, max_sequences, n_threads = self._limits
        on_gpu, rows = self._on_gpu(k), k.shape[0]
        if k.device.type not in ("cpu", "cuda"):
            raise ValueError(f"key_states: kvant supports cpu and cuda, not {k.device}")
        shape: dict[str, Any] = dict(
            n_layers=len(self.layers),
            n_kv_heads=k.shape[1],
            head_dim=k.shape[3],
            v_head_dim=v.shape[3],
        )
        key = tuple(shape.values())
        if key not in self._schemes:
            self._schemes[key] = Scheme(**self._stored, **shape)
        heads = getattr(self.config, "num_attention_heads", None)
        longest = int(getattr(self.config, "max_position_embeddings", 0) or 4096)
        if on_gpu:  # memory is taken at once: at most half of the free memory, at 8 bits per number
            per_token = len(layers) * k.shape[1] * (k.shape[3] + v.shape[3])
            longest = max(
                min(longest, torch.cuda.mem_get_info(k.device)[0] // (2 * rows * per_token)), 64
            )
        with operators.on_its_gpu(k):
            pages = Pages(
                **shape | {"n_layers": len(layers)},
                layers=(layers, len(self.layers)),
                n_heads=heads if isinstance(heads, int) and heads % k.shape[1] == 0 else k.shape[1],
                max_tokens=max_tokens or rows * longest,
                device="cuda" if on_gpu else "cpu",
                scheme=self._schemes[key],
                max_sequences=max_sequences or (rows if on_gpu else 4 * rows + 16),
                n_threads=n_threads or torch.get_num_threads(),
                stream=operators.stream_of(k),
                asynchronous=on_gpu,
            )
        for i, number in enumerate(layers):
            pages.set_rope(
                i, rope_of(self.config, number, k.shape[3], (max_tokens or rows * longest) // rows)
            )
        return pages, *operators.register(pages)

    def _step_fits(self, ids: Tensor, mask: Tensor | None) -> bool:
        """Whether a mask hides exactly the tokens that are not stored. The GPU's answer is read at
        the end of a round of steps, so that no step waits for it."""
        stores = list(self._stores.values())
        starts = stores[0].starts if stores else []
        length = self.get_seq_length() + 1
        if len(starts) != ids.shape[0] or any(store.starts != starts for store in stores):
            return False
        if mask is None or mask.shape != (len(starts), length):
            return mask is None and not any(starts)
        if (
            self._starts is None
            or self._starts[0] != starts
            or self._starts[1].device != mask.device
        ):
            self._starts = list(starts), torch.tensor(starts, device=mask.device)[:, None]
        wrong = (
            mask.to(torch.bool) != (torch.arange(length, device=mask.device) >= self._starts[1])
        ).any()
        if stores[0].steps is None or stores[0].steps.left == stores[0].steps.taken:
            self._check_masks()
            return not bool(wrong)
        self._wrong = wrong if self._wrong is None else self._wrong | wrong
        return True

    def _check_masks(self) -> None:
        wrong, self._wrong = self._wrong, None
        if wrong is not None and bool(wrong):
            raise RuntimeError(
                "attention_mask: it changed in a decode step, but kvant.transformers.graphs "
                "needs the same padding in every step"
            )

    # Functions that transformers calls for the whole cache. kvant's layers act together, and every
    # other layer separately.

    def _ours(self) -> Iterator[KvantLayer]:
        return (layer for layer in self.layers if isinstance(layer, KvantLayer))

    def _others(self) -> list[Any]:
        return [layer for layer in self.layers if not isinstance(layer, KvantLayer)]

    def _settle(self) -> list[Store]:
        """Called after rows were written that no attention has seen."""
        for layer in self.layers:
            if isinstance(layer, KvantLayer):
                layer._flush(None)
        for store in self._stores.values():
            store.settle()
        self._check_masks()
        return list(self._stores.values())

    def reset(self) -> None:
        for layer in self.layers:
            layer.reset()
        for store in self._stores.values():
            store.reset()
        self._wrong = None  # masks of the former tokens

    def reorder_cache(self, beam_idx: Tensor) -> None:
        for store in self._settle():
            store.select(beam_idx)
        for layer in self._others():
            layer.reorder_cache(beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the newest -tokens_to_remove tokens. A positive number is a length, as in earlier
        releases of transformers."""
        n = -int(tokens_to_remove)  # generate passes a tensor
        if n == 0:
            return
        stores = self._settle()
        if n < 0:
            n = max(self.get_seq_length() + n, 0)
        # After a call that failed some layers have more tokens than others.
        length = max((max(store.lengths.values(), default=0) for store in stores), default=0)
        length = max(length - n, 0)
        for store in stores:  # an error leaves all stores as they were
            store.check_crop(length)
        for layer in self._others():
            layer.crop(-n)
        for store in stores:
            store.crop(length)

    def batch_repeat_interleave(self, repeats: int) -> None:
        for store in self._settle():
            store.select(torch.arange(store.batch).repeat_interleave(repeats))
        for layer in self._others():
            layer.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        for store in self._settle():
            store.select(indices)
        for layer in self._others():
            layer.batch_select_indices(indices)

    def activate_past_recording(self) -> None:
        self._keeps_past = True
        for store in self._stores.values():
            store.keeps_past = True
        for layer in self._others():
            if hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()

    def __deepcopy__(self, memo: dict[int, Any]) -> KvantCache:
        """A cache with the same tokens. It shares their blocks until one of the two caches writes
        to them."""
        import copy

        made = type(self)(self.config, **self._stored, exact=self.exact)
        made._limits = self._limits
        made._schemes = self._schemes
        made._keeps_past = self._keeps_past
        self._settle()
        made._together = set(self._together)
        made._weights, made._seen_weights = self._weights, self._seen_weights
        made._stores = {key: store.copy() for key, store in self._stores.items()}
        for i, layer in enumerate(self.layers):
            if not isinstance(layer, KvantLayer):
                made.layers[i] = copy.deepcopy(layer, memo)
            elif layer.is_initialized:
                made.layers[i].lazy_initialization(*layer.like)
        return made

    # Stores (saving.py)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the cache to a file, which load reads in another process or on another device.
        Pages are not decoded, so the file is as large as the cache. path never holds half of
        one."""
        system.write_file(path, saving.to_bytes(self))

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        config: Any,
        *,
        device: str | torch.device = "cpu",
        **options: Any,
    ) -> KvantCache:
        """A cache that save wrote, for a model of the same configuration and weights. ValueError
        for another model and for damaged files. `options`: arguments of KvantCache; its codecs are
        by default the codecs that the file names."""
        with open(path, "rb") as file:
            return cls._of(file.read(), config, torch.device(device), options)

    @classmethod
    def _of(
        cls, data: bytes, config: Any, device: torch.device, options: dict[str, Any]
    ) -> KvantCache:
        head, blocks = saving.parse(data)
        made = cls(config, **{"exact": bool(head.get("exact"))} | head["stored"] | options)
        saving.fill(made, head, blocks, device)
        return made

    def __reduce__(self) -> Any:
        limits = dict(zip(("max_tokens", "max_sequences", "n_threads"), self._limits))
        devices = {store.device for store in self._settle() if store.device is not None}
        return type(self)._of, (
            saving.to_bytes(self),
            self.config,
            next(iter(devices), torch.device("cpu")),
            limits,
        )

    # Facts about the cache

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        """For each layer the decoded keys and values, and None, as in DynamicCache."""
        for layer in self.layers:
            yield getattr(layer, "keys", None), getattr(layer, "values", None), None

    @property
    def is_initialized(self) -> bool:
        layers = [layer for layer in self.layers if isinstance(layer, KvantLayer)]
        return bool(layers) and all(layer.is_initialized for layer in layers)

    def offload(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        self.layers[layer_idx].offload()

    prefetch = offload

    @property
    def bytes(self) -> int:
        """Memory of the stored tokens: codes, metadata, fp16 pages, learned matrices; with all
        copies of this cache."""
        self._settle()
        return sum(store.cache.bytes for store in self._stores.values() if store.cache is not None)

    @property
    def f16_bytes(self) -> int:
        """Memory of the same tokens in a cache of float16 numbers that forgets no token."""
        layers = [
            layer for layer in self.layers if isinstance(layer, KvantLayer) and layer.is_initialized
        ]
        widths = (2 * sum(x.shape[1] * x.shape[3] for x in layer.like) for layer in layers)
        return sum(
            width * layer.get_seq_length() * layer.batch_size
            for width, layer in zip(widths, layers)
        )

    def __repr__(self) -> str:
        stored = ", ".join(
            f"{name}={value!r}" for name, value in self._stored.items() if value is not None
        )
        return (
            f"KvantCache({stored or 'preset=' + repr('balanced')}: {self.get_seq_length()} "
            f"tokens, {self.bytes} bytes)"
        )
