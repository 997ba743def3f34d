#!/usr/bin/env python3
"""Makes the data sets of bench/search, with exact neighbours, in $KVANT_CACHE/search.

    bench/search/data.py                                    the synthetic sets; NumPy is enough
    $(scripts/fetch.py torch) bench/search/data.py --text wiki.test.raw minilm

A set has four files: NAME.base.npy, NAME.query.npy, NAME.tune.npy (float32 rows) and
NAME.truth.npy (int32 [queries, 100], by inner product, best first). `tune` holds other queries:
settings are chosen with `tune` and judged with `query`. All rows have length 1, so that inner
product, cosine and L2 agree, except for the rows of `offset` before it is centred.

    minilm       30,149 windows of 24 words of WikiText-2 (test), 8 words apart, by
                 all-MiniLM-L6-v2; queries: 14 words
    words        27,522 token embeddings of the same model, in place of GloVe's words; queries:
                 2000 other tokens
    gauss200     isotropic Gaussian directions, as are gauss1536 and gauss3072: a codec can find
                 no structure
    power        standard deviation of coordinate i ~ i^-0.5, then a random rotation: the spectrum
                 of an embedding
    offset       500 clusters of such a spectrum, unrotated, and one constant of the same length
                 in every row
"""

import argparse
import os
import pathlib
import subprocess
import sys

import numpy as np

NEIGHBOURS, QUERIES, SEED = 100, 1000, 7
WINDOW, STEP, QUERY_WORDS = 24, 8, 14
SIZES = {
    "gauss200": (100_000, 200),
    "gauss1536": (20_000, 1536),
    "gauss3072": (10_000, 3072),
    "power": (30_000, 768),
}
SIZES["offset"] = (30_000, 768)
NAMES = ("minilm", "words", *SIZES)
FETCH = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "fetch.py"


def folder():
    path = (
        pathlib.Path(os.environ.get("KVANT_CACHE") or pathlib.Path.home() / ".cache" / "kvant")
        / "search"
    )
    path.mkdir(parents=True, exist_ok=True)
    return path


def unit(rows):
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def load(name, part):
    return np.load(folder() / f"{name}.{part}.npy")


def gaussian(rng, n, d):
    return unit(rng.standard_normal((n, d), np.float32))


def power(rng, n, d):
    deviations = np.arange(1, d + 1, dtype=np.float32) ** -0.5
    turn, _ = np.linalg.qr(rng.standard_normal((d, d)))
    return unit(rng.standard_normal((n, d), np.float32) * deviations @ turn.astype(np.float32))


def offset(rng, n, d):
    deviations = np.arange(1, d + 1, dtype=np.float32) ** -0.5
    centres = rng.standard_normal((500, d), np.float32) * deviations
    rows = (
        centres[rng.integers(0, len(centres), n)]
        + 0.7 * rng.standard_normal((n, d), np.float32) * deviations
    )
    return unit(rows + np.linalg.norm(deviations) / np.sqrt(d))


def synthetic(name):
    n, d = SIZES[name]
    make = {"power": power, "offset": offset}.get(name, gaussian)
    rows = make(np.random.default_rng([SEED, d, len(name)]), n + 2 * QUERIES, d)
    return rows[:n], rows[n : n + QUERIES], rows[n + QUERIES :]


def encoder():
    return subprocess.run(
        [sys.executable, FETCH, "minilm"], stdout=subprocess.PIPE, check=True, text=True
    ).stdout.strip()


def words():
    from transformers import AutoModel

    table = AutoModel.from_pretrained(encoder()).embeddings.word_embeddings.weight.detach().numpy()
    rows = unit(table[1000:])  # before them: padding, unused tokens, single letters
    rows = rows[np.random.default_rng(SEED).permutation(len(rows))]
    return rows[2 * QUERIES :], rows[:QUERIES], rows[QUERIES : 2 * QUERIES]


def embed(texts):
    """Means of the last layer over the tokens, of length 1, as sentence-transformers computes
    them."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    path = encoder()
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModel.from_pretrained(path).eval()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    order = sorted(
        range(len(texts)), key=lambda i: len(texts[i])
    )  # texts of one length need little padding
    rows = np.empty((len(texts), model.config.hidden_size), np.float32)
    for first in range(0, len(order), 64):
        here = order[first : first + 64]
        batch = tokenizer(
            [texts[i] for i in here],
            padding=True,
            truncation=True,
            max_length=256,
            return_tensors="pt",
        )
        with torch.inference_mode():
            state, mask = model(**batch).last_hidden_state, batch["attention_mask"][..., None]
            rows[here] = (state * mask).sum(1).div(mask.sum(1)).numpy()
    return unit(rows)


def minilm(text):
    words = pathlib.Path(text).read_text(encoding="utf-8").split()
    windows = [" ".join(words[at : at + WINDOW]) for at in range(0, len(words) - WINDOW, STEP)]
    starts = np.random.default_rng(SEED).integers(0, len(words) - QUERY_WORDS, 2 * QUERIES)
    queries = embed([" ".join(words[at : at + QUERY_WORDS]) for at in starts])
    return embed(windows), queries[:QUERIES], queries[QUERIES:]


def make(name, text):
    return minilm(text) if name == "minilm" else words() if name == "words" else synthetic(name)


def neighbours(base, queries):
    """Exact: candidates by float32 products, their order by float64."""
    found = np.empty((len(queries), NEIGHBOURS), np.int32)
    for first in range(0, len(queries), 100):
        rows = queries[first : first + 100]
        near = np.argpartition(-(rows @ base.T), 2 * NEIGHBOURS, axis=1)[:, : 2 * NEIGHBOURS]
        exact = np.einsum("qd,qnd->qn", rows.astype(np.float64), base[near].astype(np.float64))
        order = np.lexsort((near, -exact), axis=1)[:, :NEIGHBOURS]
        found[first : first + 100] = np.take_along_axis(near, order, 1)
    return found


def recall(base, queries, truth, found, k):
    """Share of the first k of found [queries, >= k] whose exact product is no smaller than the k-th
    best product, so that equal rows count. The margin of 1e-9 is for the order in which float64
    sums are computed. An id of -1, or one that occurs twice, counts as missed."""
    hits = 0
    for row, best, ids in zip(queries.astype(np.float64), truth, found[:, :k]):
        ids = np.unique(ids[ids >= 0])
        hits += np.sum(base[ids] @ row >= base[best[k - 1]] @ row - 1e-9)
    return hits / (k * len(queries))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", help="for minilm: the text that is cut into windows")
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"of {', '.join(NAMES)}; default: the synthetic ones",
    )
    arguments = parser.parse_args()
    for name in arguments.names or SIZES:
        if name not in NAMES:
            parser.error(f"there is no set {name}")
        if name == "minilm" and not arguments.text:
            parser.error("minilm needs --text")
        base, query, tune = make(name, arguments.text)
        for part, rows in (
            ("base", base),
            ("query", query),
            ("tune", tune),
            ("truth", neighbours(base, query)),
        ):
            np.save(folder() / f"{name}.{part}.npy", rows)
        print(name, base.shape, query.shape, flush=True)


if __name__ == "__main__":
    main()
