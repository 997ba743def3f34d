"""Makes a tiny random model of any class of transformers, and inputs for it. Configurations are
shrunk by the names of their numbers, so models of later releases need no change here. A class for
which that does not work is an error for the caller to handle.
"""

import copy
import dataclasses
import inspect
import math
import re

import torch
from transformers.models.auto import modeling_auto

# A configuration that no pattern shrank makes a larger model, which takes too long.
MOST_PARAMETERS = 20_000_000
VOCABULARY, TOKENS, IMAGE = 128, 24, 32

HEAD, ROPE, HEADS = 16, 8, 4  # numbers of a head, and of the part that RoPE rotates; heads
LAYERS = (
    r"(num_hidden_layers|n_layers?|num_layers|encoder_layers|decoder_layers|num_blocks|depth|"
    r"num_hidden_groups)$"
)

# New values of numbers, by the first pattern that matches their name. Heads share kv heads in pairs
# if a model allows that.
SIZES = (
    (r"(^|_)(vocab_size|n_tokens|codebook_size)$|^vocab_size", VOCABULARY),
    (
        r"(max_position_embeddings|n_positions|max_seq_len|n_ctx|max_source_positions|"
        r"max_target_positions|max_sequence_length)$",
        512,
    ),
    (
        r"(pad_token_id|bos_token_id|eos_token_id|decoder_start_token_id|sep_token_id|"
        r"cls_token_id|unk_token_id|mask_token_id)$",
        1,
    ),
    (r"^mamba_n_heads$", 8),  # times mamba_d_head: twice the hidden size
    (r"(mamba_d_ssm|mamba_intermediate_size)$", 128),
    (r"(rope_head_dim|rotary_dim|qk_rope_head_dim|mrope_dim)$", 8),
    (
        r"(v_head_dim|head_dim|d_kv|kv_channels|head_size|attention_head_size|d_head|dim_head|"
        r"key_dim|value_dim)$",
        16,
    ),
    (
        r"(num_key_value_heads|num_kv_heads|multi_query_group_num|num_global_key_value_heads|"
        r"n_kv_heads)$",
        2,
    ),
    (
        r"(num_.*attention_heads|num_heads|n_heads?|attention_heads|num_attention_heads|"
        r"mamba_n_heads)$",
        4,
    ),
    (LAYERS, 2),
    (r"(num_.*experts_per_tok|moe_topk|moe_k|num_selected_experts|top_k)$", 2),
    (r"(num_local_experts|n_routed_experts|num_experts|moe_num_experts|num_moe_experts)$", 4),
    (r"^(topk_group|n_group|num_expert_group|n_shared_experts)$", 1),
    (r"(lora_rank|lora_dim|_rank)$", 16),
    (
        r"(sliding_window|window_size|attention_window|local_attention|attention_chunk_size|"
        r"attn_window)$",
        8,
    ),
    (r"^(image_size|img_size|input_size)$", IMAGE),
    (r"^patch_size$", 8),
    (
        r"(intermediate_size.*|ffn_dim|n_inner|d_ff|d_inner|ffn_hidden_size|inner_dim|mlp_dim|"
        r"ffw_hidden_size)$",
        64,
    ),
    (r"^(spatial_merge_size|temporal_patch_size)$", 2),
    (
        r"(hidden_size|d_model|n_embd|embed_dim|hidden_dim|embedding_size|dim|emb_dim|"
        r"projection_dim|projector_hidden_size|width)$",
        64,
    ),
    (r"(num_mel_bins|state_size|d_state|ssm_state_size)$", 16),
    (r"(num_queries|num_query_tokens|query_length|num_latents|num_image_tokens)$", 8),
)

# Model types whose RoPE has sections, with a default in their code.
MROPE = re.compile(r"qwen2.*(vl|omni)|glm.*(4v|46v|ocr|image|ga)|paddleocr_vl")

# Numbers that belong together and whose names do not show it.
ALSO = {
    "falcon_h1": dict(
        mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=1, mamba_d_state=16
    ),
    "granitemoehybrid": dict(layer_types=["mamba", "attention"]),
    "mamba2": dict(num_heads=8, head_dim=16),
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]]),
    "jamba": dict(
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        use_mamba_kernels=False,
    ),
    "recurrent_gemma": dict(num_hidden_layers=3),
    "reformer": dict(axial_pos_embds_dim=(16, 48), axial_pos_shape=(16, 32)),
    "zamba": dict(num_hidden_layers=4, layers_block_type=["mamba", "hybrid"] * 2),
    "zamba2": dict(num_hidden_layers=4, layers_block_type=["mamba", "hybrid"] * 2),
    "bamba": dict(attn_layer_indices=[1]),
}


def _names(kind, default):
    """The arguments of the configuration's constructor."""
    fields = (
        [field.name for field in dataclasses.fields(default)]
        if dataclasses.is_dataclass(default)
        else []
    )
    return list(dict.fromkeys([*fields, *inspect.signature(kind.__init__).parameters]))


def _number(name, old):
    """The small number that replaces an old one, or None."""
    if isinstance(old, bool) or not isinstance(old, int) or old <= 0:
        return None
    return next((min(old, size) for pattern, size in SIZES if re.search(pattern, name)), None)


def _numbers(names, default):
    found = {}
    for name in names:
        try:
            size = _number(name, getattr(default, name, None))
        except ValueError:  # a number that layers do not share
            continue
        if size is not None:
            found[name] = size
    return found


def _together(values, names, default):
    """Sets numbers that depend on other numbers."""
    if "head_dim" in names and getattr(default, "hidden_size", None) and "head_dim" not in values:
        values["head_dim"] = HEAD
    if (
        "qk_rope_head_dim" in values
    ):  # every head has its own keys, of which RoPE rotates a part of few numbers
        values |= {
            name: x
            for name, x in dict(head_dim=ROPE, num_key_value_heads=HEADS).items()
            if name in names
        }
    rope = getattr(default, "rope_parameters", None)
    if isinstance(rope, dict) and ("mrope_section" in rope or MROPE.search(default.model_type)):
        part = (
            rope.get("partial_rotary_factor")
            or getattr(default, "partial_rotary_factor", None)
            or 1
        )
        half = int(HEAD * part) // 2
        values["rope_parameters"] = rope | {
            "mrope_section": [half - 2 * (half // 3), half // 3, half // 3]
        }
    kinds = getattr(default, "layer_types", None)
    if isinstance(kinds, (list, tuple)) and "layer_types" in names:
        once = list(dict.fromkeys(kinds))
        layers = max(2, len(once))
        values |= {name: layers for name in values if re.search(LAYERS, name)}
        values["layer_types"] = (once * layers)[:layers]


def shrunk(kind, **given):
    """A small configuration of a class."""
    default = kind()
    names = _names(kind, default)
    values = _numbers(names, default)
    _together(values, names, default)
    for name in getattr(kind, "sub_configs", {}):
        part = getattr(default, name, None)
        if part is not None:
            values[name] = shrunk(type(part))
    if hasattr(default, "is_decoder"):
        values["is_decoder"] = True
    return kind(**values | ALSO.get(kind.model_type, {}) | given)


def classes():
    """(model type, class name) of every kind of model; the class that generates tokens, if there is
    one.
    """
    found = {}
    for mapping in (
        "CAUSAL_LM",
        "IMAGE_TEXT_TO_TEXT",
        "SEQ_TO_SEQ_CAUSAL_LM",
        "SPEECH_SEQ_2_SEQ",
        "MULTIMODAL_LM",
        None,
    ):
        name = f"MODEL_FOR_{mapping}_MAPPING_NAMES" if mapping else "MODEL_MAPPING_NAMES"
        for kind, made in getattr(modeling_auto, name, {}).items():
            for one in [made] if isinstance(made, str) else made[:1]:
                found.setdefault(kind, one)
    return sorted(found.items())


def weights(model, seed=0):
    """Random weights with which attention distinguishes tokens: rows of matrices have unit length,
    whatever the class begins with.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, x in sorted(model.named_parameters()):
            if not x.is_floating_point():
                continue
            if x.dim() > 1:
                size = 1.0 if "embed" in name else 1.0 / math.sqrt(x.shape[-1])
                x.copy_(torch.randn(x.shape, generator=generator) * size)
            elif "sink" in name:
                x.normal_(generator=generator)
    return model


def make(model_class, config, implementation):
    """The model with an attention implementation. Equal seeds give equal weights. Raises ValueError
    for a large model.
    """
    config = copy.deepcopy(config)
    with torch.device("meta"):
        size = sum(x.numel() for x in model_class._from_config(copy.deepcopy(config)).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"too large: {size / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    return weights(model_class._from_config(config, attn_implementation=implementation).eval())


def inputs(model, config, batch=2, tokens=TOKENS, seed=1):
    """Arguments of forward() by name. Raises KeyError for a required argument that is unknown
    here.
    """
    generator = torch.Generator().manual_seed(seed)
    parameters = inspect.signature(model.forward).parameters
    ids = torch.randint(3, 100, (batch, tokens), generator=generator)
    part = getattr(config, "vision_config", None) or config
    size = getattr(part, "image_size", IMAGE)
    size = size if isinstance(size, int) else size[0]
    channels = getattr(part, "num_channels", None) or getattr(part, "in_channels", 3) or 3
    known = {
        "input_ids": ids,
        "decoder_input_ids": ids[:, : tokens // 2],
        "pixel_values": torch.randn(
            batch, channels if isinstance(channels, int) else 3, size, size, generator=generator
        ),
        "input_values": torch.randn(batch, 4000, generator=generator),
        "input_features": torch.randn(
            batch,
            getattr(config, "num_mel_bins", 80),
            2 * getattr(config, "max_source_positions", 50),
            generator=generator,
        ),
        "bbox": torch.zeros(batch, tokens, 4, dtype=torch.int64),
    }
    wanted = [
        name
        for name in ("input_ids", "input_values", "input_features", "pixel_values")
        if name in parameters
    ]
    made = {}
    if model.main_input_name in known:
        made[model.main_input_name] = known[model.main_input_name]
    elif wanted:
        made[wanted[0]] = known[wanted[0]]
    if "decoder_input_ids" in parameters:
        made["decoder_input_ids"] = known["decoder_input_ids"]
    if (
        type(model).__name__.startswith(("CLIPModel", "Clip"))
        or "pixel_values" in parameters
        and model.main_input_name == "input_ids"
        and not model.can_generate()
    ):
        made["pixel_values"] = known["pixel_values"]
    for name, parameter in parameters.items():
        if parameter.default is inspect.Parameter.empty and parameter.kind not in (
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
        ):
            if name not in made:
                made[name] = known[name]
    return made
