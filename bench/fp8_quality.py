"""Measures what vLLM's fp8 cache costs in quality: keys and values rounded to e4m3 with a scale of
1, which vLLM uses for a checkpoint without scales. The model runs with transformers on a CPU, in
float32. It scores the same positions as `kvant eval -c 2048 --chunks N`, so both KLDs compare.

vLLM on Hopper also rounds queries to e4m3 (FlashAttention-3). This script does not, so vLLM's own
loss may be larger.

    bench/fp8_quality.py --csv bench/results/vllm_quality.csv --text wiki.test.raw MODEL.gguf ..."""

from __future__ import annotations

import argparse
import csv
import datetime
import math
import pathlib

import torch
from record import commit, machine
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import DynamicCache

LARGEST = 448.0  #: of e4m3; larger numbers become this one, as in vLLM
BATCH = 512


class Fp8Cache(DynamicCache):
    """The stock cache, except that rows are rounded to e4m3 before anything reads them."""

    def update(self, keys, values, *arguments, **options):
        rounded = (
            x.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).to(x.dtype) for x in (keys, values)
        )
        return super().update(*rounded, *arguments, **options)


@torch.no_grad()
def compare(model, tokens):
    """KLDs and whether the most probable token is the same, after each token."""
    caches = [kind(config=model.config) for kind in (DynamicCache, Fp8Cache)]
    for part in tokens.split(BATCH):  # both caches at once: words are many, so logits are large
        exact, rounded = (
            torch.log_softmax(
                model(part[None], past_key_values=cache, use_cache=True).logits[0].float(), -1
            )
            for cache in caches
        )
        yield (exact.exp() * (exact - rounded)).sum(-1), exact.argmax(-1) == rounded.argmax(-1)


def measure(path, text, context, chunks):
    """KLDs and whether the most probable token is the same, of the second half of each context."""
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    parts = []
    for tokens in ids[: chunks * context].split(context):
        if tokenizer.bos_token_id is not None and getattr(tokenizer, "add_bos_token", False):
            tokens = torch.cat([torch.tensor([tokenizer.bos_token_id]), tokens[1:]])
        found = [torch.cat(column) for column in zip(*compare(model, tokens))]
        parts.append([column[context // 2 : -1] for column in found])
    return [torch.cat(column) for column in zip(*parts)]


def main():
    a = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    a.add_argument("models", nargs="+", type=pathlib.Path)
    a.add_argument("--csv", required=True, type=pathlib.Path)
    a.add_argument("--text", required=True, type=pathlib.Path)
    a.add_argument("--context", type=int, default=2048)
    a.add_argument("--chunks", type=int, default=1)
    a = a.parse_args()
    text = a.text.read_text()[: 8 * a.context * a.chunks]
    names = a.csv.read_text().splitlines()[0].split(",")
    for path in a.models:
        kld, same = measure(path, text, a.context, a.chunks)
        line = {
            "model": path.name.split(".Q")[0],
            "cache": "fp8",
            "k": "e4m3",
            "v": "e4m3",
            "bits": 8,
            "kld_mean": float(kld.mean()),
            "kld_se": float(kld.std()) / math.sqrt(len(kld)),
            "top1": float(same.float().mean()),
            "text": a.text.name,
            "from": a.context // 2,
            "to": a.context - 2,
            "chunks": a.chunks,
            "date": datetime.date.today().isoformat(),
            "machine": machine(),
            "commit": commit(),
            "command": f"fp8_quality.py --chunks {a.chunks}",
        }
        print(line["model"], f"KLD {line['kld_mean']:.5f} +- {line['kld_se']:.5f}", flush=True)
        with a.csv.open("a", newline="") as file:
            csv.DictWriter(file, names, lineterminator="\n").writerow(line)


if __name__ == "__main__":
    main()
