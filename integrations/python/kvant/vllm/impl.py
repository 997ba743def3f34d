"""Attention of a layer over kvant's pages, on CPUs and GPUs."""

from __future__ import annotations

import functools
import os
import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionImpl, AttentionType
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
)

from ..calibration import Calibration
from ..library import PAGE_TOKENS
from . import (
    BESIDE_MODEL,
    FRAGILE,
    STORED,
    Stored,
    chosen,
    codecs,
    is_ours,
    learn,
    limits,
    self_check,
)
from .batch import Batch, Builder, Options, Part
from .codecs import cell_bytes, even_cells, heads_of_rank
from .learn import LOG, Learner
from .limits import WITHOUT

# Pages by their memory and the layer's number.
_in_use: weakref.WeakValueDictionary[tuple[Any, int], Any] = weakref.WeakValueDictionary()
# The codecs of the layers made last, and all layers by name. vLLM asks a backend for the size of
# blocks and names neither the dtype nor the model.
_stored: list[tuple[Stored, dict[str, Any]]] = []
# Their blocks hold a row of keys and one of values per token.
_SPECS = (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)


def customize_spec(spec: Any, layer: int = -1) -> Any:
    """Sets the true size of a token and kv head, so that vLLM's scheduler counts the blocks
    correctly. `layer`: its number, if its codecs differ from the codecs of other layers."""
    of_values, per_state = getattr(spec, "head_size_v", None), getattr(spec, "tokens_per_state", 1)
    if type(spec) not in _SPECS or of_values not in (None, spec.head_size) or per_state != 1:
        shape = f"head_dim {spec.head_size} of keys, {of_values} of values"
        raise NotImplementedError(
            f"kvant: vLLM's {type(spec).__name__} ({shape}) is not supported; {WITHOUT}"
        )
    stored, layers = _stored[-1] if _stored else (chosen(), {})
    assert stored is not None
    if _one_group(layers):
        cell = cell_bytes(stored.of_layer(layer), spec.head_size)
        if layer == 0:  # its line is the one of the other layers
            return replace(spec, state_content_bytes=cell)
    elif stored.learns:
        raise ValueError(
            "kvant: learned transforms need a calibration if layers have windows or several kinds: "
            "set KVANT_VLLM_CALIBRATION to a file of kvant.calibrate, or put "
            f"{BESIDE_MODEL} next to the model"
        )
    else:
        stored, own = stored.of_layer(-1), (spec.num_kv_heads, spec.head_size)
        shapes = {
            (one.impl.num_kv_heads, one.impl.head_size)
            for one in layers.values()
            if isinstance(getattr(one, "impl", None), Impl)
        }
        cell = even_cells(stored, shapes | {own})[own]
    _say(stored, spec.head_size, cell)
    return replace(spec, state_content_bytes=cell)


def _one_group(layers: dict[str, Any]) -> bool:
    """Whether all layers with a cache are plain attention. vLLM then keeps them in one group, in
    which layers may have blocks of any size. In other models it pads all blocks to equal bytes, so
    there kvant gives all layers the same codecs."""
    return all(
        type(layer) is Attention and isinstance(layer.impl, Impl) and not layer.impl.sliding_window
        for layer in layers.values()
        if isinstance(layer, AttentionLayerBase)
    )


def _backend_of_layer(backend: Any, number: int) -> Any:
    """The backend of a layer, which knows the layer's number when vLLM asks for its spec."""

    class OfLayer(backend):  # type: ignore[misc]
        customize_spec = staticmethod(functools.partial(customize_spec, layer=number))

    OfLayer.__module__, OfLayer.__qualname__ = backend.__module__, backend.__qualname__
    return OfLayer


@functools.lru_cache
def _say(stored: Stored, head_dim: int, cell: int) -> None:
    """Logs one line per kind of layer at the start: the codecs that blocks hold, and their bits per
    number."""
    of_file = f", calibration {stored.calibration}" if stored.calibration else ""
    if stored.learns:
        of_file = f", transforms from the first {learn.ONLINE_TOKENS} prompt tokens"
    first = f" ({stored.first_k} in the first layer)" if stored.first_k else ""
    bits = 8 * cell / (2 * head_dim)
    LOG.info(
        "kvant: blocks hold keys as %s%s, values as %s: %.2f bits per number at head_dim %d%s",
        stored.k,
        first,
        stored.v,
        bits,
        head_dim,
        of_file,
    )
    if any(stored[:2] == STORED[name][:2] for name in FRAGILE):
        LOG.warning(
            "kvant: %s fails on models whose keys have outliers, such as Qwen2.5: check the "
            "answers of your model, or use turboquant4 or a preset",
            stored.k,
        )


def _learning(config: Any, stored: Stored, layers: dict[str, Any]) -> list[Learner]:
    """The learners of the model: for a file, for a preset without a calibration, or none."""
    path, model = os.environ.get("KVANT_VLLM_LEARN"), config.model_config.model or ""
    if path:
        limits.check_learning(config)
    if learn.is_new(layers):
        codecs.learned.calibration = None
    if not learn.learners:
        if path:
            positions = int(os.environ.get("KVANT_VLLM_LEARN_POSITIONS") or 0)
            learn.learners.append(Learner(model, learn.TOKENS, learn.save(path), positions))
        if stored.learns:
            use = functools.partial(_use, layers)
            learn.learners.append(Learner(model, learn.ONLINE_TOKENS, use))
    return learn.learners


def _use(layers: dict[str, Any], calibration: Calibration) -> None:
    """Gives all layers the transforms that were learned, and encodes their rows again."""
    codecs.learned.calibration = calibration
    seen = set()
    for layer in layers.values():
        pages = getattr(getattr(layer, "impl", None), "pages", None)
        if pages is not None and id(pages) not in seen:
            seen.add(id(pages))
            pages.relearn(layer.kv_cache)
    for layer in layers.values():  # all layers have sealed their exact blocks
        pages = getattr(getattr(layer, "impl", None), "pages", None)
        if pages is not None:
            pages.forget()
    LOG.info("kvant: learned transforms from %d tokens", calibration.info.n_tokens)


def _check_block_size(cache: Any) -> None:
    """Names the sizes that a kernel takes, which vLLM's error about a wrong size does not."""
    if cache.user_specified_block_size and cache.block_size % PAGE_TOKENS:
        raise ValueError(
            f"kvant: --block-size has to be a multiple of {PAGE_TOKENS}, not {cache.block_size}"
        )


def _is_draft(layer: Any, name: str) -> bool:
    """Whether a layer drafts tokens for the model. vLLM's newer runner says so. Layers of an MTP
    head count from 0 again, so their numbers equal numbers of the model's layers."""
    return getattr(layer, "is_draft_layer", False) or name.startswith(("draft_model.", "mtp."))


class Backend:
    """The common part of the backends for CPUs and GPUs."""

    # So queries are known when rows are written, and one launch may take both.
    forward_includes_kv_cache_update = True
    customize_spec = staticmethod(customize_spec)

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: Any) -> bool:
        return is_ours(kv_cache_dtype)

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        return [PAGE_TOKENS]

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder


class Impl(AttentionImpl):  # type: ignore[misc]
    Pages: Any  #: of a layer: write and attend

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> None:
        if alibi_slopes is not None or attn_type != AttentionType.DECODER:
            raise NotImplementedError(
                f"kvant: vLLM's models with ALiBi and its encoders are not supported; {WITHOUT}"
            )
        unknown = sorted(
            name for name, value in others.items() if value is not None and value is not False
        )
        if unknown:
            raise NotImplementedError(
                f"kvant: attention with {', '.join(unknown)} is not supported; {WITHOUT}"
            )
        self.num_heads, self.head_size = num_heads, head_size
        self.num_kv_heads = num_kv_heads or num_heads
        self.scale, self.kv_cache_dtype, self.sinks = float(scale), kv_cache_dtype, sinks
        self.sliding_window, self.logits_soft_cap = sliding_window or 0, logits_soft_cap or 0.0
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.config = config = get_current_vllm_config()
        limits.check(config)
        model = config.model_config
        stored = chosen(kv_cache_dtype, model.model)
        if stored is None:
            named = f"kvant_NAME or auto with KVANT_VLLM, not {kv_cache_dtype}"
            raise ValueError(f"kvant: --kv-cache-dtype has to be {named}, which is vLLM's own")
        _check_block_size(config.cache_config)
        self.stored, self.layers = stored, config.compilation_config.static_forward_context
        _stored[:] = [(stored, self.layers)]
        ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        self.learners = _learning(config, stored, self.layers)
        self.heads = heads_of_rank(self.num_kv_heads, model.get_total_num_kv_heads(), *ranks)
        self.pages, self.place = None, None
        self.pool: Any = None  # of exact blocks

    def _pages(self, layer: Any, kv_cache: Tensor) -> Any:
        """Pages in the layer's current memory: vLLM assigns another memory after it has measured
        how much there is. Layers that attend to another layer's keys share its pages."""
        place = kv_cache.data_ptr(), kv_cache.shape, kv_cache.stride()
        if self.place != place:
            name = self.kv_sharing_target_layer_name or layer.layer_name
            self._refuse_drafts(layer, name)
            number = extract_layer_index(name)
            self.pages, self.place = _in_use.get((place, number)), place
            if self.pages is None:
                stored = self.stored.of_layer(number if _one_group(self.layers) else -1)
                self.pages = _in_use[place, number] = self.Pages(
                    stored, kv_cache, number, self.heads, self.head_size
                )
                if self.pool is not None:
                    self.pages.use(self.pool)
        return self.pages

    def _refuse_drafts(self, layer: Any, name: str) -> None:
        if (self.stored.calibration or self.stored.learns) and _is_draft(layer, name):
            raise NotImplementedError(
                "kvant: a calibration belongs to one model; with draft models use codecs "
                "without a calibration, such as turboquant4"
            )

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Writes rows without attention, for draft models that store contexts themselves."""
        n = len(slot_mapping)
        self._pages(layer, kv_cache).write_apart(key[:n], value[:n], slot_mapping)

    def _write(
        self, pages: Any, query: Tensor, key: Tensor | None, value: Tensor | None, batch: Batch
    ) -> Any:
        """Writes a step's rows. Layers that attend to another layer's keys have none. The result
        holds the queries for attend(), if pages made them and all parts attend to pages."""
        if key is None or value is None or self.kv_sharing_target_layer_name is not None:
            return None
        n, of_pages = len(batch.slot_mapping), not any(x.fresh or x.long for x in batch.parts)
        queries = query[:n] if of_pages else None
        return pages.write(key[:n], value[:n], batch.slot_mapping, queries, batch.exact)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Checks the codecs of this layer. vLLM calls this before it assigns memory."""
        name = next(
            (name for name, layer in self.layers.items() if getattr(layer, "impl", None) is self),
            None,
        )
        if name is None or self.kv_sharing_target_layer_name is not None:
            return
        layer, number = self.layers[name], extract_layer_index(name)
        self._refuse_drafts(layer, name)
        if self.stored.first_k and number == 0:
            layer.attn_backend = _backend_of_layer(layer.attn_backend, number)
        # vLLM comes here again when it loads other weights, and graphs have the pool's address.
        if self.pool is None and not _is_draft(layer, name) and _one_group(self.layers):
            self.pool = self._made_pool(number)
        self_check.check(self, number, act_dtype, self._options(True))

    def _made_pool(self, layer: int) -> Any:
        """The memory of the layer's exact blocks, or None. vLLM has not measured yet how much
        memory is left."""
        return None

    def _options(self, causal: bool) -> Options:
        return Options(self.scale, self.sliding_window, self.logits_soft_cap, self.sinks, causal)

    def _learn(self, layer: Any, part: Part, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> None:
        """Lets learners see whole prompts."""
        if _is_draft(layer, layer.layer_name):
            return
        starts = batch.query_start_loc[part.first : part.last + 1].tolist()
        for own in map(slice, starts, starts[1:]):
            options = self.scale, self.sliding_window, self.logits_soft_cap
            for learner in self.learners:
                learner.see(extract_layer_index(layer.layer_name), q[own], k[own], v[own], *options)

    def attend_rows(
        self, pages: Any, part: Part, q: Tensor, k: Tensor, v: Tensor, out: Tensor, batch: Batch
    ) -> bool:
        """Computes attention over rows, for whole prompts and for long parts of a prompt. False
        when it cannot; the caller then attends to pages."""
        return False

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Batch | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if attn_metadata is None:  # a run that measures memory
            return output.fill_(0)
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError(f"kvant: quantised outputs are not supported; {WITHOUT}")
        pages, batch = self._pages(layer, kv_cache), attn_metadata
        out = output.view(-1, self.num_heads, self.head_size)
        rotated = self._write(pages, query, key, value, batch)
        for part in batch.parts:
            if part.fresh and key is not None and not all(x.done for x in self.learners):
                self._learn(layer, part, query, key, value, batch)
            rows = (part.fresh or part.long) and key is not None
            if not (rows and self.attend_rows(pages, part, query, key, value, out, batch)):
                pages.attend(query, out, batch, part, self._options(batch.causal), rotated)
        return output
