"""The attention implementation "kvant" of transformers. It reads compressed pages if the keys
belong to a KvantCache, and plain rows otherwise."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from . import dense
from .masks import shape_of, plain
from .rows import Rows

# Arguments of attention functions that change the result and that kvant does not support.
_REFUSED = (
    "position_bias head_mask layer_head_mask block_mask cu_seq_lens_q cu_seq_lens_k indices"
).split()

# With "kvant", transformers always makes a mask, so this model passed none. In that case eager
# attention lets a query see every token, and all further implementations hide later tokens if the
# module is causal, which is the default. The model means only one of the two.
_NO_MASK = (
    'attn_implementation="kvant": this model gave its attention no mask, and does not say '
    "whether later tokens are seen: give "
    'the model an attention_mask, or load it with attn_implementation="eager"'
)


def _refuse(module: Any, dropout: float, options: dict[str, Any]) -> None:
    given = [name for name in _REFUSED if options.get(name) is not None]
    if given:
        raise ValueError(
            f'attn_implementation="kvant" does not support {", ".join(given)}: '
            "use another attn_implementation for this model"
        )
    if dropout and module.training:
        raise ValueError('attn_implementation="kvant" has no dropout: call model.eval()')


@functools.cache
def warn_of_plain_keys() -> None:
    """Warns once: without past_key_values=, transformers makes a DynamicCache, which is not
    compressed."""
    warnings.warn(
        'attn_implementation="kvant" reads keys that nothing compresses: give the model, or '
        "generate, "
        "past_key_values=kvant.transformers.KvantCache(model.config), unless a KvantCache said "
        "that it does not compress this layer",
        stacklevel=3,
    )


def _heads(mask: Tensor | None) -> int:
    return 1 if mask is None or mask.dim() < 4 else mask.shape[1]


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """query [batch, heads, n, head_dim]; key and value: the results of a cache's update. Returns
    [batch, n, heads, head_dim of values]. ValueError for an argument that would change the result
    in an unknown way."""
    _refuse(module, dropout, options)
    scale = query.shape[3] ** -0.5 if scaling is None else float(scaling)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    attention_mask, shape = plain(attention_mask)
    window = int(sliding_window or 0) if shape is None else shape.window
    causal = causal if shape is None else True
    if (
        type(key) is Rows
        and type(value) is Rows
        and key.layer is value.layer
        and _heads(attention_mask) == 1
    ):
        if shape is None and (attention_mask is None or attention_mask.dim() == 2):
            seen = (
                None if attention_mask is None else attention_mask[:, : key.length].to(torch.bool)
            )
            shape = shape_of(seen, query.shape[0], window)
        how = dict(scale=scale, softcap=softcap, sinks=s_aux)
        return key.layer.attend(query, attention_mask, shape, key.length, causal, how), None
    if (
        attention_mask is None
        and causal
        and is_causal is None
        and query.shape[2] > 1
        and type(key) is not Rows
    ):
        raise ValueError(_NO_MASK)
    compressed = type(key) is Rows
    key, value = (x.decoded() if type(x) is Rows else x for x in (key, value))
    tokens = key.shape[2]
    config = getattr(module, "config", None)
    if (
        not compressed
        and tokens > query.shape[2]
        and causal
        and not getattr(config, "is_encoder_decoder", False)
    ):
        warn_of_plain_keys()
    added = dense.bias(
        attention_mask,
        window,
        causal and tokens >= query.shape[2],
        query.shape[2],
        tokens,
        query.device,
    )
    if added.shape[2] not in (1, query.shape[2]) or added.shape[3] not in (1, tokens):
        fits = f"{query.shape[2]} queries and {tokens} keys"
        raise ValueError(
            f'attn_implementation="kvant": a mask of {list(added.shape)} does not fit {fits}'
        )
    return dense.attention(query, key, value, added, scale, softcap, s_aux), None


AttentionInterface.register("kvant", attention)
