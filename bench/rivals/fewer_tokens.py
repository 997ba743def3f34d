#!/usr/bin/env python3
"""Makes a smaller model for a machine to which little can be carried: rows of the embedding whose
tokens cannot stand in a text are left out. The text has the same tokens in both models, because
every piece that the tokenizer could try in the text is kept. Probabilities are over the tokens that
are left. All further tensors stay bit for bit, except that --feed-forward-q4_0 writes the
feed-forward matrices as Q4_0.

    python3 scripts/fetch.py torch      # prints the Python that this needs
    PYTHON bench/rivals/fewer_tokens.py model.gguf text.txt smaller.gguf"""

import argparse
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from gguf import GGMLQuantizationType, GGUFReader, dequantize, quantize  # noqa: E402
from long_prepare import pruned  # noqa: E402
from pieces import as_pieces, kept_merges, pieces_in  # noqa: E402

# Kinds of pieces that are kept: what a user defined, bytes, and control tokens, which chats need.
OTHER = {"llama": (4, 6), "gpt2": (3, 4, 6)}
FIRST = 512  # tokens that are kept with their ids, among them those that the model's header names


def feed_forward_q4_0(name, data, kind):
    if ".ffn_" not in name or not name.endswith("weight") or "norm" in name:
        return data, kind
    made = GGMLQuantizationType.Q4_0
    return quantize(dequantize(data, kind).astype(np.float32), made), made


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("model", "text", "output"):
        parser.add_argument(name, type=pathlib.Path)
    parser.add_argument(
        "--first", type=int, default=FIRST, help=f"tokens that are kept anyway (default {FIRST})"
    )
    parser.add_argument("--feed-forward-q4_0", action="store_true")
    options = parser.parse_args()
    fields = GGUFReader(options.model).fields
    tokenizer = fields["tokenizer.ggml.model"].contents()
    if tokenizer not in OTHER:
        sys.exit(f"fewer_tokens: the model's tokenizer is {tokenizer}, not llama or gpt2")
    tokens = fields["tokenizer.ggml.tokens"].contents()
    kinds = fields["tokenizer.ggml.token_type"].contents()
    found = pieces_in(as_pieces(options.text.read_text(), tokenizer), set(tokens))
    # Pieces of line ends stand across lines, and are few.
    keep = [
        i
        for i, (token, kind) in enumerate(zip(tokens, kinds))
        if i < options.first or token in found or "\n" in token or kind in OTHER[tokenizer]
    ]
    merges = None
    if tokenizer == "gpt2":
        merges = kept_merges(fields["tokenizer.ggml.merges"].contents(), {tokens[i] for i in keep})
    change = feed_forward_q4_0 if options.feed_forward_q4_0 else None
    pruned(options.model, options.output, keep, None, merges, change)
    print(
        f"{options.output.name}: {options.output.stat().st_size / 1e6:.1f} MB, {len(keep)} tokens"
    )


if __name__ == "__main__":
    main()
