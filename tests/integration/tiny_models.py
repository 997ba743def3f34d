#!/usr/bin/env python3
"""Writes models of random weights without a vocabulary, one for each kind of cache that llama.cpp
has:

    tiny_models.py FOLDER      llama.gguf (plain), llama16.gguf, llama24.gguf, llama80.gguf and
                               llama128.gguf (head_dim 16, 24, 80, 128),
                               gemma3.gguf (sliding window), gemma2.gguf (softcap),
                               gpt-oss.gguf (sinks, window),
                               lfm2.gguf (recurrent state), latents.gguf (MLA),
                               deepseek2.gguf (MLA whose rows the plug-in leaves to llama.cpp)
"""

import array
import pathlib
import random
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "scripts"))
import gguf_head  # noqa: E402

EMBD, HEADS, KV, DIM, FF, VOCAB, LAYERS = 256, 4, 2, 64, 256, 256, 4


def keys(arch, **special):
    common = {
        "block_count": LAYERS,
        "context_length": 4096,
        "embedding_length": EMBD,
        "feed_forward_length": FF,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV,
        "attention.key_length": DIM,
        "attention.value_length": DIM,
        "rope.dimension_count": DIM,
        "vocab_size": VOCAB,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    }
    common.update((name.replace("__", "."), v) for name, v in special.items())
    return {
        "general.architecture": arch,
        "tokenizer.ggml.model": "no_vocab",
        **{f"{arch}.{k}": v for k, v in common.items()},
    }


def attention(i, norms=False, bias=False, dim=DIM):
    rows = [
        ("attn_norm.weight", (EMBD,)),
        ("attn_q.weight", (EMBD, HEADS * dim)),
        ("attn_k.weight", (EMBD, KV * dim)),
        ("attn_v.weight", (EMBD, KV * dim)),
        ("attn_output.weight", (HEADS * dim, EMBD)),
    ]
    if norms:
        rows += [("attn_q_norm.weight", (DIM,)), ("attn_k_norm.weight", (DIM,))]
    if bias:
        rows += [
            ("attn_q.bias", (HEADS * DIM,)),
            ("attn_k.bias", (KV * DIM,)),
            ("attn_v.bias", (KV * DIM,)),
            ("attn_output.bias", (EMBD,)),
        ]
    return [(f"blk.{i}.{name}", dims) for name, dims in rows]


def dense(i, post=False):
    rows = [
        ("ffn_norm.weight", (EMBD,)),
        ("ffn_gate.weight", (EMBD, FF)),
        ("ffn_up.weight", (EMBD, FF)),
        ("ffn_down.weight", (FF, EMBD)),
    ]
    if post:
        rows += [("post_attention_norm.weight", (EMBD,)), ("post_ffw_norm.weight", (EMBD,))]
    return [(f"blk.{i}.{name}", dims) for name, dims in rows]


def experts(i):
    n = 2
    rows = [
        ("post_attention_norm.weight", (EMBD,)),
        ("attn_sinks.weight", (HEADS,)),
        ("ffn_gate_inp.weight", (EMBD, n)),
        ("ffn_gate_inp.bias", (n,)),
    ]
    for name, shape in (("gate", (EMBD, FF)), ("up", (EMBD, FF)), ("down", (FF, EMBD))):
        rows += [(f"ffn_{name}_exps.weight", (*shape, n)), (f"ffn_{name}_exps.bias", (shape[1], n))]
    return [(f"blk.{i}.{name}", dims) for name, dims in rows]


def convolution(i):
    return [
        (f"blk.{i}.attn_norm.weight", (EMBD,)),
        (f"blk.{i}.shortconv.conv.weight", (3, EMBD)),
        (f"blk.{i}.shortconv.in_proj.weight", (EMBD, 3 * EMBD)),
        (f"blk.{i}.shortconv.out_proj.weight", (EMBD, EMBD)),
    ]


def latent(i, q_rank=32, rank=64, rope=32, nope=32):
    rows = [
        ("attn_norm.weight", (EMBD,)),
        ("attn_q_a.weight", (EMBD, q_rank)),
        ("attn_q_a_norm.weight", (q_rank,)),
        ("attn_q_b.weight", (q_rank, HEADS * (nope + rope))),
        ("attn_kv_a_mqa.weight", (EMBD, rank + rope)),
        ("attn_kv_a_norm.weight", (rank,)),
        ("attn_k_b.weight", (nope, rank, HEADS)),
        ("attn_v_b.weight", (rank, DIM, HEADS)),
        ("attn_output.weight", (HEADS * DIM, EMBD)),
    ]
    return [(f"blk.{i}.{name}", dims) for name, dims in rows]


ENDS = [
    ("token_embd.weight", (EMBD, VOCAB)),
    ("output_norm.weight", (EMBD,)),
    ("output.weight", (EMBD, VOCAB)),
]


def each(*parts):
    return [tensor for i in range(LAYERS) for part in parts for tensor in part(i)]


def latent_keys(rank, rope, nope=32):
    return keys(
        "deepseek2",
        attention__head_count_kv=1,
        attention__q_lora_rank=32,
        attention__kv_lora_rank=rank,
        attention__key_length=rank + rope,
        attention__value_length=rank,
        attention__key_length_mla=nope + rope,
        attention__value_length_mla=DIM,
        rope__dimension_count=rope,
        leading_dense_block_count=LAYERS,
        expert_feed_forward_length=FF,
        expert_shared_count=0,
        expert_count=2,
        expert_used_count=1,
    )


MODELS = {
    "llama": (keys("llama"), ENDS + each(attention, dense)),
    "llama16": (
        keys(
            "llama", attention__key_length=16, attention__value_length=16, rope__dimension_count=16
        ),
        ENDS + each(lambda i: attention(i, dim=16), dense),
    ),
    "llama24": (
        keys(
            "llama", attention__key_length=24, attention__value_length=24, rope__dimension_count=24
        ),
        ENDS + each(lambda i: attention(i, dim=24), dense),
    ),
    "llama80": (
        keys(
            "llama", attention__key_length=80, attention__value_length=80, rope__dimension_count=80
        ),
        ENDS + each(lambda i: attention(i, dim=80), dense),
    ),
    "llama128": (
        keys(
            "llama",
            attention__key_length=128,
            attention__value_length=128,
            rope__dimension_count=128,
        ),
        ENDS + each(lambda i: attention(i, dim=128), dense),
    ),
    "gemma3": (
        keys("gemma3", attention__sliding_window=64, attention__sliding_window_pattern=2),
        ENDS + each(lambda i: attention(i, norms=True), lambda i: dense(i, post=True)),
    ),
    "gemma2": (
        keys(
            "gemma2",
            attention__sliding_window=64,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=30.0,
        ),
        ENDS[:2] + each(attention, lambda i: dense(i, post=True)),
    ),
    "gpt-oss": (
        keys(
            "gpt-oss",
            attention__sliding_window=64,
            expert_count=2,
            expert_used_count=2,
            expert_feed_forward_length=FF,
        ),
        ENDS + each(lambda i: attention(i, bias=True), experts),
    ),
    "lfm2": (
        keys("lfm2", shortconv__l_cache=3, attention__head_count_kv=[0, KV] * (LAYERS // 2)),
        [ENDS[0], ("token_embd_norm.weight", (EMBD,))]
        + each(lambda i: attention(i, norms=True) if i % 2 else convolution(i), dense),
    ),
    "deepseek2": (latent_keys(64, 32), ENDS + each(latent, dense)),
    "latents": (latent_keys(256, 64), ENDS + each(lambda i: latent(i, rank=256, rope=64), dense)),
}


def numbers(name, dims, source, gain):
    n, size = 1, 1.0
    for d in dims:
        n *= d
    if name.endswith("norm.weight"):
        return array.array("f", [1.0 + source.uniform(-0.2, 0.2) for _ in range(n)])
    if "sinks" in name:
        return array.array("f", [source.uniform(1, 4) for _ in range(n)])
    if name.endswith("bias"):
        size = 2.0 if "attn_k" in name else 0.1  # keys with a mean, as in models with such biases
    else:
        size = gain / dims[0] ** 0.5
    return array.array("f", [source.uniform(-size, size) for _ in range(n)])


def write(path, pairs, tensors, gain):
    source = random.Random(1)
    data = b""
    for name, dims in tensors:
        data += numbers(name, dims, source, gain).tobytes()
        data += bytes(-len(data) % 32)
    path.write_bytes(
        gguf_head.head(pairs, [(name, dims, gguf_head.F32) for name, dims in tensors]) + data
    )


for model, (pairs, tensors) in MODELS.items():
    # With less gain, errors of one layer grow little in the next layers. With more gain, attention
    # distinguishes tokens.
    gain = 1.7 if model.startswith(("llama", "latents")) else 3.0
    write(pathlib.Path(sys.argv[1]) / f"{model}.gguf", pairs, tensors, gain)
