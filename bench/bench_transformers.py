#!/usr/bin/env python3
"""Decode speed and memory of KvantCache beside transformers' own caches, with random weights: CSV rows on
stdout, one per cache and shape. All caches of a shape run in one process, in turn, in several rounds; a row has the
median round.

    bench/bench_transformers.py --layers 32 --context 32768 --batch 8 --device cuda
    bench/bench_transformers.py --layers 4 --context 2048 --hidden 576 --heads 9 --kv-heads 3 --head-dim 64   # on a CPU
"""

import argparse
import csv
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "integrations" / "python"))

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StaticCache  # noqa: E402

import kvant  # noqa: E402
from kvant.transformers import KvantCache  # noqa: E402

COLUMNS = "cache preset batch context tokens_per_s ms_per_token prefill_s cache_bytes peak_bytes".split()


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    # The defaults are the shape of Llama 3.1 8B.
    for name, default in dict(
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        feed_forward=14336,
        batch=1,
        context=32768,
        tokens=32,
        rounds=3,
        prefill_chunk=4096,
    ).items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--presets", default="balanced", help="of kvant, with commas")
    parser.add_argument(
        "--stock", default="dynamic,static", help="of transformers, with commas: dynamic, static, quanto"
    )
    return parser.parse_args()


def make_model(a):
    config = AutoConfig.for_model(
        "llama",
        num_hidden_layers=a.layers,
        hidden_size=a.hidden,
        num_attention_heads=a.heads,
        num_key_value_heads=a.kv_heads,
        head_dim=a.head_dim,
        intermediate_size=a.feed_forward,
        vocab_size=32000,
        max_position_embeddings=2 * (a.context + a.tokens),
        initializer_range=0.02,
    )
    with torch.device(a.device):
        torch.manual_seed(0)
        torch.set_default_dtype(getattr(torch, a.dtype))
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
        torch.set_default_dtype(torch.float32)
    return model


def make_cache(a, model, name):
    kind, _, preset = name.partition(":")
    if kind == "kvant":
        return KvantCache(model.config, preset, max_tokens=a.batch * (a.context + a.tokens + 64))
    if kind == "static":
        return StaticCache(config=model.config, max_cache_len=a.context + a.tokens)
    if kind == "quanto":
        return transformers.QuantizedCache("quanto", model.config, nbits=4)
    return DynamicCache(config=model.config)


def synchronize(a):
    if a.device != "cpu":
        torch.cuda.synchronize()


def size_of(cache):
    if isinstance(cache, KvantCache):
        return cache.bytes
    return sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values) if torch.is_tensor(x))


def round_of(a, model, name):
    """Seconds per token, seconds of prefill, bytes of the cache, peak."""
    model.set_attn_implementation("kvant" if name.startswith("kvant") else "sdpa")
    cache = make_cache(a, model, name)
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(0, 32000, (a.batch, a.context), generator=generator).to(a.device)
    with torch.inference_mode():
        synchronize(a)
        start = time.perf_counter()
        for part in prompt.split(a.prefill_chunk, 1):
            token = model(part, past_key_values=cache, logits_to_keep=1).logits.argmax(-1)
        synchronize(a)
        prefill = time.perf_counter() - start
        if a.device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        token = model(token, past_key_values=cache, logits_to_keep=1).logits.argmax(-1)  # the first has more to set up
        synchronize(a)
        start = time.perf_counter()
        for _ in range(a.tokens - 1):
            token = model(token, past_key_values=cache, logits_to_keep=1).logits.argmax(-1)
        synchronize(a)
        seconds = (time.perf_counter() - start) / (a.tokens - 1)
    return seconds, prefill, size_of(cache), torch.cuda.max_memory_allocated() if a.device != "cpu" else 0


def main():
    a = arguments()
    model = make_model(a)
    names = [f"kvant:{preset}" for preset in a.presets.split(",") if preset] + [x for x in a.stock.split(",") if x]
    print(
        f"PyTorch {torch.__version__}, transformers {transformers.__version__}, kvant {kvant.version()}",
        file=sys.stderr,
    )
    rounds = {name: [] for name in names}
    for _ in range(a.rounds):
        for name in names:
            rounds[name].append(round_of(a, model, name))
    rows = csv.writer(sys.stdout)
    rows.writerow(COLUMNS)
    for name, found in rounds.items():
        seconds, prefill, size, peak = (statistics.median(values) for values in zip(*found))
        kind, _, preset = name.partition(":")
        rows.writerow(
            [
                kind,
                preset,
                a.batch,
                a.context,
                f"{a.batch / seconds:.2f}",
                f"{1000 * seconds:.3f}",
                f"{prefill:.3f}",
                int(size),
                int(peak),
            ]
        )


if __name__ == "__main__":
    main()
