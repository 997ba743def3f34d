#!/usr/bin/env python3
"""TurboQuant's Figure 2c: the products QK^T of one decoded token with all keys of a layer, on codes
and by PyTorch's einsum.

    $(scripts/fetch.py torch) bench/papers_products.py --append bench/results/papers_products.csv

kvant's product is a step of its vector search, without softmax and values. It includes
the rotation of queries and the search for the best key. Each kv head has an index. Attention reads
other pages with similar kernels; cpu_attention.csv has it as a whole. On a CPU all use one thread,
and the figures are CPU time, so that other programs do not count. Rows are normal numbers. A round
times every product once, and the ratio is the median of the rounds' ratios.

On a GPU a product of few rows takes less time than a call, so measure all heads as one index:

    bench/papers_products.py --device cuda --kv-heads 1 --gqa 32 --tokens 1048576 --append ..."""

import pathlib
import statistics
import sys
import time

import numpy as np
import torch

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "integrations" / "python")]

import record  # noqa: E402

from kvant.index import Index  # noqa: E402

SPECS = [*(f"turboquant-{b}" for b in (1, 2, 3, 4, 8)), "trellis-4"]
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def on_codes(spec, keys, queries, device):
    """A function that computes all products of a codec."""
    indexes = []
    for some in keys:
        indexes.append(Index(some.shape[1], "ip", spec, device=device))
        indexes[-1].add(some, n_threads=1)

    def measure():
        for index, query in zip(indexes, queries):
            index.search(query, 1, n_threads=1)

    return measure


def by_einsum(kind, keys, queries, device):
    k, q = (torch.from_numpy(x).to(device, kind) for x in (keys, queries))

    def measure():
        torch.einsum("hgd,htd->hgt", q, k)
        if device == "cuda":
            torch.cuda.synchronize()

    return measure


def timed(measure, clock):
    begin = clock()
    measure()
    return clock() - begin


def main():
    parser = record.options_of(__doc__)
    parser.add_argument("--append", type=pathlib.Path, help="CSV that rows are appended to")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--gqa", type=int, default=4, help="query heads of a kv head")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    keys, queries = (
        rng.standard_normal((given.kv_heads, n, given.head_dim), np.float32)
        for n in (given.tokens, given.gqa)
    )
    products = {
        f"einsum, {name}": by_einsum(kind, keys, queries, given.device)
        for name, kind in TYPES.items()
    }
    products |= {spec: on_codes(spec, keys, queries, given.device) for spec in SPECS}
    clock = time.perf_counter if given.device == "cuda" else time.process_time
    for measure in products.values():
        measure()  # the first call is slower
    times = [{name: timed(f, clock) for name, f in products.items()} for _ in range(given.rounds)]
    words = [word for word in sys.argv[1:] if "/" not in word and word != "--append"]
    about = {"pytorch": torch.__version__} | record.context(["papers_products.py", *words])
    if given.device == "cuda":
        about["machine"] = torch.cuda.get_device_name()
    rows = [
        {
            "product": name,
            "head_dim": given.head_dim,
            "kv_heads": given.kv_heads,
            "gqa": given.gqa,
            "tokens": given.tokens,
            "threads": 1,
            "rounds": given.rounds,
            "microseconds": 1e6 * statistics.median(x[name] for x in times),
            "times_float32": statistics.median(x["einsum, float32"] / x[name] for x in times),
            **about,
        }
        for name in products
    ]
    for row in rows:
        print(f"{row['product']:36} {row['microseconds']:10.0f} us {row['times_float32']:6.2f} x")
    if given.append:
        record.append(given.append, rows)


if __name__ == "__main__":
    main()
