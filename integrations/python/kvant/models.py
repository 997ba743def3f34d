"""Models of transformers: gathering a calibration, and what a compressed cache costs in quality.

kvant.calibrate(model, texts, tokenizer).save("model.kvcal")
for row in kvant.evaluate(model, texts, tokenizer, ["balanced", {"preset": "small"}]):
    print(row.name, row.kld, row.bytes / row.f16_bytes)"""

from __future__ import annotations

import math
from typing import Any, Callable, Iterator, NamedTuple, Sequence, Union

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from . import moments
from .calibration import Calibration, Calibrator
from .library import PAGE_TOKENS
from .transformers import KvantCache, dense
from .transformers.fingerprint import fingerprint
from .watching import Seen, attending, model_name, watch

Texts = Union[str, Sequence[str], Tensor]

_BATCH = 512  # tokens of a pass, as the kvant command has them
_SAMPLED = 16  # every 16th query shows which keys attention looks at


def _tokens(texts: Texts, tokenizer: Any) -> Tensor:
    """int64 [n]. Arrays are token ids already."""
    if hasattr(texts, "__array__"):
        ids = torch.as_tensor(texts)
        if ids.is_floating_point():
            raise TypeError(f"texts: token ids are whole numbers, not {ids.dtype}")
        return ids.reshape(-1).to("cpu", torch.int64)
    if tokenizer is None:
        raise TypeError("tokenizer: texts need one, unless they are arrays of token ids")
    texts = [texts] if isinstance(texts, str) else list(texts)
    ids = [
        torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.int64)
        for text in texts
    ]
    return torch.cat(ids) if ids else torch.zeros(0, dtype=torch.int64)


def _contexts(texts: Texts, tokenizer: Any, length: int, most: int) -> list[Tensor]:
    """At most `most` tokens, cut into contexts of `length` tokens. Each begins with the model's
    first token (BOS) if the tokenizer has one."""
    found = list(_tokens(texts, tokenizer)[:most].split(length))
    first = getattr(tokenizer, "bos_token_id", None)
    if first is not None and getattr(tokenizer, "add_bos_token", False):
        for context in found:
            context[0] = first
    return found


def whole_contexts(texts: Texts, tokenizer: Any, length: int, n: int) -> list[Tensor]:
    """At most n contexts of `length` tokens each. ValueError for texts with less than one."""
    found = _contexts(texts, tokenizer, length, length * n)
    found = [part for part in found if len(part) == length]
    if not found:
        raise ValueError(
            f"texts: they have fewer tokens than one context of {length}: give longer texts, or a "
            "smaller context"
        )
    return found


# Calibration


class _Gathering:
    """Adds a model's rows to a calibrator. The first attention layer makes it: the fingerprint of
    that layer's weights identifies the model."""

    def __init__(self, **options: Any) -> None:
        self.options, self.calibrator = options, None  # type: ignore[var-annotated]

    def see(self, seen: Seen) -> None:
        q, k, v = seen.q, seen.k, seen.v
        sums = moments.of_keys(k) | moments.of_queries(q, len(k))
        some = q[:, _SAMPLED - 1 :: _SAMPLED]
        if (
            not seen.softcap and some.shape[1]
        ):  # scores that are not <q, k> times a factor are left out
            added = dense.bias(seen.mask, seen.window, True, q.shape[1], k.shape[1], q.device)
            added = added.expand(1, 1, *added.shape[2:])[0, 0, _SAMPLED - 1 :: _SAMPLED]
            sums |= moments.of_attention(some, k, added, seen.scale, PAGE_TOKENS)
        self._add(seen.module, "k", k, sums)
        self._add(seen.module, "v", v, moments.of_rows(v))

    def _add(self, module: Any, role: str, rows: Tensor, sums: dict[str, Any]) -> None:
        if self.calibrator is None:
            self.calibrator = Calibrator(model_fingerprint=fingerprint(module), **self.options)
        named = {name: x.cpu().numpy() if torch.is_tensor(x) else x for name, x in sums.items()}
        sampled = (
            rows.transpose(0, 1).to("cpu", torch.float32).contiguous().numpy()
            if self.options["clusters"]
            else None
        )
        self.calibrator.add_moments(module.layer_idx, role, rows.shape[1], rows=sampled, **named)


def calibrate(
    model: Any,
    texts: Texts,
    tokenizer: Any = None,
    *,
    n_tokens: int = 8192,
    context: int = 2048,
    positions: int = 0,
    clusters: Sequence[int] = (),
    seed: int = 0,
    n_threads: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> Calibration:
    """Statistics of a causal model's keys, values and queries over the first n_tokens tokens of
    `texts`: strings, or an array of token ids. Its save() writes them to the .kvcal file that
    KvantCache(calibration=) and Cache(calibration=) use. The model runs on its own device, and the
    statistics are summed there. `positions`: RoPE rotates some channels so slowly that a short
    context shows few of their angles. For longer contexts, their positions are spread over 0 ..
    positions - 1. `progress` is called with the part that is done, 0 to 1. `clusters`: sizes of
    sets of centroids for kmeans codecs, which take minutes on the CPU.

    A calibration belongs to one model as transformers computes it. llama.cpp orders the channels of
    some models' keys differently; `kvant calibrate` makes its file."""
    contexts = [
        part for part in _contexts(texts, tokenizer, context, n_tokens) if len(part) >= _SAMPLED
    ]
    total = sum(map(len, contexts))
    least = max(clusters, default=_SAMPLED)
    if total < least:
        raise ValueError(
            f"texts: {total} tokens, and at least {least} are needed: give longer texts"
        )
    gather = _Gathering(
        model=model_name(model), seed=seed, clusters=tuple(clusters), n_threads=n_threads
    )
    share = 0.5 if clusters else 1.0
    watch(
        model, contexts, gather.see, progress and (lambda done: progress(share * done)), positions
    )
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    if gather.calibrator is None:
        raise ValueError("model: kvant cannot observe its attention")
    return gather.calibrator.finish(progress and (lambda left: progress(1 - 0.5 * left / layers)))


# Quality


class Evaluation(NamedTuple):
    """`kld`: mean KL divergence from the stock cache in nats, and its standard error. `perplexity`:
    of the text. `same_top`: the share of tokens whose most probable token is also the stock
    cache's. `bytes`: memory of one context's cache; `f16_bytes`: of the same tokens in float16."""

    name: str
    kld: float
    kld_error: float
    perplexity: float
    same_top: float
    bytes: int
    f16_bytes: int


def _logits(model: Any, tokens: Tensor, cache: Any, batch: int) -> Iterator[Tensor]:
    """Log-probabilities, float32 [n, words], batch by batch."""
    for part in tokens.split(batch):
        logits = model(part[None].to(model.device), past_key_values=cache, use_cache=True).logits[0]
        yield torch.log_softmax(logits.float(), -1)


class _Sums:
    def __init__(self, name: str) -> None:
        self.name, self.kld, self.nll, self.top = name, [], [], []  # type: ignore[var-annotated]
        self.bytes = self.f16_bytes = 0

    def add(self, reference: Tensor, found: Tensor, targets: Tensor) -> None:
        self.kld += (reference.exp() * (reference - found)).sum(-1).tolist()
        self.nll += (-found.gather(1, targets[:, None].to(found.device))[:, 0]).tolist()
        self.top += (reference.argmax(-1) == found.argmax(-1)).tolist()

    def row(self) -> Evaluation:
        n = len(self.kld)
        mean = sum(self.kld) / n
        error = math.sqrt(sum((x - mean) ** 2 for x in self.kld) / max(n - 1, 1) / n)
        ppl = math.exp(sum(self.nll) / n)
        return Evaluation(
            self.name, mean, error, ppl, sum(self.top) / n, self.bytes, self.f16_bytes
        )


def _stored(cache: str | dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Name and arguments of KvantCache: of a preset's name, or of a dictionary of them."""
    if isinstance(cache, str):
        return cache, {"preset": cache}
    return " ".join(f"{name}={value}" for name, value in cache.items()), dict(cache)


def evaluate(
    model: Any,
    texts: Texts,
    tokenizer: Any = None,
    caches: Sequence[str | dict[str, Any]] = ("balanced",),
    *,
    context: int = 2048,
    n_contexts: int = 4,
    first: int | None = None,
) -> list[Evaluation]:
    """Compares the quality of caches on texts with the stock cache, which is the first element.
    `caches`: names of presets, or arguments of KvantCache as dictionaries. Texts are cut into
    contexts, of which tokens from `first` on are scored, by default the second half, as
    `kvant eval` does. A cache has room for one context unless its arguments say max_tokens: the
    part that a preset keeps as fp16 grows with that room."""
    first = context // 2 if first is None else first
    parts = whole_contexts(texts, tokenizer, context, n_contexts)
    if not 0 <= first < context - 1:
        raise ValueError(f"first: {first} is not from 0 to {context - 2}")
    return [
        total.row()
        for total in _measured(model, parts, first, [_stored(cache) for cache in caches])
    ]


def _measured(
    model: Any,
    parts: Sequence[Tensor],
    first: int,
    stored: Sequence[tuple[str, dict[str, Any]]],
    batch: int = _BATCH,
) -> list[_Sums]:
    """Scores the stock cache and each stored one on the tokens from `first` on, in contexts of one
    length. `batch` tokens are written at once."""
    sums = [_Sums("stock"), *(_Sums(name) for name, _ in stored)]
    for part in parts:
        # Row i says what follows token i.
        scored, targets = slice(first, len(part) - 1), part[first + 1 :]
        with attending(model, _stock_attention(model)):
            stock = DynamicCache(config=model.config)
            reference = torch.cat(list(_logits(model, part, stock, batch)))[scored]
        sums[0].add(reference, reference, targets)
        held = [
            x
            for layer in stock.layers
            for x in (getattr(layer, "keys", None), getattr(layer, "values", None))
            if x is not None
        ]
        sums[0].bytes = sum(x.nbytes for x in held)
        sums[0].f16_bytes = sum(2 * x.numel() for x in held)
        with attending(model, "kvant"):
            for total, (_, options) in zip(sums[1:], stored):
                room = {"max_tokens": len(part), "max_sequences": 1}
                cache = KvantCache(model.config, **room | options)
                found = torch.cat(list(_logits(model, part, cache, batch)))
                total.add(reference, found[scored], targets)
                total.bytes, total.f16_bytes = cache.bytes, cache.f16_bytes
    return sums


def _stock_attention(model: Any) -> str:
    """The attention that the model was loaded with, unless it is kvant's."""
    chosen = model.config._attn_implementation
    if chosen != "kvant":
        return str(chosen)
    return "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"
