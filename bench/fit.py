#!/usr/bin/env python3
"""Writes fit.csv: the memory of KV caches with models that people know, by context.

    bench/fit.py --commit $(git rev-parse --short HEAD) > bench/results/fit.csv

fit_models.csv has the models' shapes. For each shape this makes a GGUF file with the layers, kv
heads, head dimension and window of the model, and with weights that are holes in the file.
`kvant inspect` then makes contexts with it: llama.cpp says how many cells each layer has, and the
plug-in says how much memory they take. So nothing is computed here, and no model needs to be
fetched."""

import argparse
import csv
import json
import os
import pathlib
import subprocess
import sys
import tempfile

BENCH = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(BENCH.parent / "scripts"))
import gguf_head  # noqa: E402

CONTEXTS = (8192, 32768, 131072)
FACTS = ("model", "layers", "kv_heads", "head_dim", "window")
SIZES = "kv_bytes cache_bits transform_bytes exact_bytes working_bytes".split()
COLUMNS = [*FACTS, "memory", "cache", "context", *SIZES, "commit", "command"]
# The size of a cache does not depend on these.
EMBEDDING, FEED_FORWARD, VOCABULARY, EXPERTS = 64, 64, 64, 2
AT_ONCE = 6  # contexts that kvant inspect takes


def shapes():
    """{model: {column of fit_models.csv: value}}"""
    with open(BENCH / "fit_models.csv", newline="", encoding="utf-8") as file:
        return {line["model"]: line for line in csv.DictReader(file)}


def metadata(shape):
    architecture, heads, width = (shape[key] for key in ("architecture", "kv_heads", "head_dim"))
    own = {
        "block_count": int(shape["layers"]),
        "context_length": max(CONTEXTS),
        "embedding_length": EMBEDDING,
        "feed_forward_length": FEED_FORWARD,
        "attention.head_count": int(heads),  # one query head for each kv head
        "attention.head_count_kv": int(heads),
        "attention.key_length": int(width),
        "attention.value_length": int(width),
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": int(width),
        "rope.freq_base": 10000.0,
        "vocab_size": VOCABULARY,
    }
    if int(shape["window"]) > 0:  # llama.cpp knows which layers of an architecture have it
        own["attention.sliding_window"] = int(shape["window"])
    if architecture == "gpt-oss":
        own.update({f"expert_{of}": EXPERTS for of in ("count", "used_count")})
        own["expert_feed_forward_length"] = FEED_FORWARD
    named = {f"{architecture}.{key}": v for key, v in own.items()}
    return {
        "general.architecture": architecture,
        "general.name": shape["model"],
        "tokenizer.ggml.model": "no_vocab",
        **named,
    }


def attention(shape):
    """{tensor of a layer: dimensions}"""
    architecture, width = shape["architecture"], int(shape["head_dim"])
    all_heads = width * int(shape["kv_heads"])
    tensors = {"attn_norm.weight": [EMBEDDING], "attn_output.weight": [all_heads, EMBEDDING]}
    tensors.update({f"attn_{of}.weight": [EMBEDDING, all_heads] for of in "qkv"})
    if architecture in ("qwen3", "gemma3"):
        tensors.update({f"attn_{of}_norm.weight": [width] for of in "qk"})
    if architecture == "gpt-oss":
        tensors.update({f"attn_{of}.bias": [all_heads] for of in "qkv"})
        tensors["attn_output.bias"] = [EMBEDDING]
        tensors["attn_sinks.weight"] = [int(shape["kv_heads"])]
    return tensors


def feed_forward(shape):
    """{tensor of a layer: dimensions}"""
    ways = {
        "gate": (EMBEDDING, FEED_FORWARD),
        "up": (EMBEDDING, FEED_FORWARD),
        "down": (FEED_FORWARD, EMBEDDING),
    }
    if shape["architecture"] == "gpt-oss":
        tensors = {
            "post_attention_norm.weight": [EMBEDDING],
            "ffn_gate_inp.bias": [EXPERTS],
            "ffn_gate_inp.weight": [EMBEDDING, EXPERTS],
        }
        for way, (of, to) in ways.items():
            tensors[f"ffn_{way}_exps.weight"] = [of, to, EXPERTS]
            tensors[f"ffn_{way}_exps.bias"] = [to, EXPERTS]
        return tensors
    norms = ["ffn_norm"]
    if shape["architecture"] == "gemma3":
        norms += ["post_attention_norm", "post_ffw_norm"]
    return {
        **{f"{norm}.weight": [EMBEDDING] for norm in norms},
        **{f"ffn_{way}.weight": list(sides) for way, sides in ways.items()},
    }


def write_model(path, shape):
    """A GGUF file of this shape. Its weights are zeros, which take no room on a disk."""
    ends = {
        "token_embd.weight": [EMBEDDING, VOCABULARY],
        "output_norm.weight": [EMBEDDING],
        "output.weight": [EMBEDDING, VOCABULARY],
    }
    layer = {**attention(shape), **feed_forward(shape)}
    of_layers = {
        f"blk.{i}.{name}": dims for i in range(int(shape["layers"])) for name, dims in layer.items()
    }
    tensors = [(name, dims, gguf_head.F32) for name, dims in {**ends, **of_layers}.items()]
    with open(path, "wb") as file:
        head = gguf_head.head(metadata(shape), tensors)
        file.write(head)
        file.truncate(len(head) + sum(gguf_head.size(dims, kind) for _, dims, kind in tensors))


def inspected(kvant, model, on_gpu, contexts=CONTEXTS):
    """The rows of kvant inspect for the usual caches, full, at all contexts."""
    rows, words = [], [kvant, "inspect", "-m", model, "--json", *(["--gpu"] if on_gpu else [])]
    for i in range(0, len(contexts), AT_ONCE):
        some = ",".join(map(str, contexts[i : i + AT_ONCE]))
        done = subprocess.run([*words, "-c", some], capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{' '.join(map(str, words))} -c {some}:\n{done.stderr}")
        rows += [row for row in json.loads(done.stdout) if row["filled"] == 100]
    return rows


def lines(kvant, models, folder, places=("cpu", "gpu")):
    """Lines of fit.csv without the last two columns, of these models."""
    for name, shape in models.items():
        path = os.path.join(folder, f"{name}.gguf")
        write_model(path, shape)
        for place in places:
            for row in inspected(kvant, path, place == "gpu"):
                cache = row["preset"] or row["k"]
                sizes = {key: round(row[key]) for key in SIZES}
                sizes["cache_bits"] = f"{row['cache_bits']:.3f}"
                facts = (shape[key] for key in FACTS)
                yield [*facts, place, cache, row["ctx"], *sizes.values()]
        os.unlink(path)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--commit", required=True)
    parser.add_argument("--kvant", default=BENCH.parent / "build" / "bin" / "kvant")
    options = parser.parse_args()
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(COLUMNS)
    with tempfile.TemporaryDirectory() as folder:
        for line in lines(options.kvant, shapes(), folder):
            writer.writerow([*line, options.commit, "bench/fit.py"])


if __name__ == "__main__":
    main()
