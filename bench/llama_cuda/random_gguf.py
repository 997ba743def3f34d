#!/usr/bin/env python3
"""Writes a llama model of random Q4_0 weights for measuring speed. It has no vocabulary.

Needs only numpy. The defaults are Llama-3-8B's shape:

    random_gguf.py OUT.gguf [layers=32 embd=4096 ff=14336 heads=32 kv=8 vocab=32000 ctx=131072]
"""

import math
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "scripts"))
import gguf_head  # noqa: E402
from gguf_head import F32, Q4_0  # noqa: E402

BLOCK_BYTES, BLOCK = 18, 32  # of Q4_0

shape = dict(layers=32, embd=4096, ff=14336, heads=32, kv=8, vocab=32000, ctx=131072)
shape.update((key, int(value)) for key, value in (a.split("=") for a in sys.argv[2:]))
head_dim = shape["embd"] // shape["heads"]
random = np.random.default_rng(1)

KEYS = {
    "general.architecture": "llama",
    "general.name": "random",
    "llama.block_count": shape["layers"],
    "llama.context_length": shape["ctx"],
    "llama.embedding_length": shape["embd"],
    "llama.feed_forward_length": shape["ff"],
    "llama.attention.head_count": shape["heads"],
    "llama.attention.head_count_kv": shape["kv"],
    "llama.rope.dimension_count": head_dim,
    "llama.vocab_size": shape["vocab"],
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 500000.0,
    "tokenizer.ggml.model": "no_vocab",
}


def tensors():
    embd, ff, kv = shape["embd"], shape["ff"], shape["kv"] * head_dim
    yield "token_embd.weight", (embd, shape["vocab"])
    yield "output_norm.weight", (embd,)
    yield "output.weight", (embd, shape["vocab"])
    for i in range(shape["layers"]):
        for name, dims in (
            ("attn_norm", (embd,)),
            ("attn_q", (embd, embd)),
            ("attn_k", (embd, kv)),
            ("attn_v", (embd, kv)),
            ("attn_output", (embd, embd)),
            ("ffn_norm", (embd,)),
            ("ffn_gate", (embd, ff)),
            ("ffn_up", (embd, ff)),
            ("ffn_down", (ff, embd)),
        ):
            yield f"blk.{i}.{name}.weight", dims


def pool_of_blocks():
    blocks = random.integers(0, 256, (1 << 20, BLOCK_BYTES), dtype=np.uint8)
    low, high = blocks & 15, blocks >> 4  # a nibble of 0 is -8: without it the mean is 0
    blocks = np.where(low == 0, 8, low) | np.where(high == 0, 8, high) << 4
    blocks = blocks.astype(np.uint8)
    blocks[:, :2] = np.frombuffer(np.float16(0.2 / np.sqrt(shape["embd"])).tobytes(), np.uint8)
    return blocks.tobytes()


def write_tensor(out, dims, kind, pool):
    left = math.prod(dims) // BLOCK * BLOCK_BYTES if kind == Q4_0 else 0
    end = out.tell() + gguf_head.size(dims, kind)
    if kind == F32:
        out.write(np.ones(dims, np.float32).tobytes())
    while left > 0:  # another part of the pool each time
        start = int(random.integers(0, 1 << 19)) * BLOCK_BYTES
        n = min(left, len(pool) - start)
        out.write(pool[start : start + n])
        left -= n
    out.write(bytes(end - out.tell()))


def main():
    listed = [(name, dims, F32 if len(dims) == 1 else Q4_0) for name, dims in tensors()]
    pool = pool_of_blocks()
    with open(sys.argv[1], "wb") as out:
        out.write(gguf_head.head(KEYS, listed))
        for _, dims, kind in listed:
            write_tensor(out, dims, kind, pool)
        print(f"{sys.argv[1]}: {out.tell() / 1e9:.2f} GB")


main()
