#!/usr/bin/env python3
"""Makes a smaller model for a machine to which little can be carried: rows of the embedding whose
tokens cannot stand in a text are left out. The text has the same tokens in both models, because
every piece that the tokenizer could try in the text is kept. All further tensors stay bit for bit.
Probabilities are over the tokens that are left. Tokenizers of SentencePiece only, such as Gemma's.

    python3 scripts/fetch.py torch      # prints the Python that this needs
    PYTHON bench/rivals/fewer_tokens.py model.gguf text.txt smaller.gguf"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from gguf import GGUFReader  # noqa: E402
from long_prepare import pruned  # noqa: E402

OTHER = (4, 6)  # kinds of pieces that are kept: what a user defined, and bytes
FIRST = 512  # tokens that are kept with their ids, among them those that the model's header names


def pieces_in(text, pieces):
    """Which of the pieces stand anywhere in the text."""
    longest = max(map(len, pieces))
    found = set()
    for line in set(text.splitlines(keepends=True)):
        for begin in range(len(line)):
            for end in range(begin + 1, min(begin + longest, len(line)) + 1):
                if line[begin:end] in pieces:
                    found.add(line[begin:end])
    return found


def main():
    model, text, output = map(pathlib.Path, sys.argv[1:])
    fields = GGUFReader(model).fields
    if fields["tokenizer.ggml.model"].contents() != "llama":
        sys.exit("fewer_tokens: the model's tokenizer is not SentencePiece's")
    tokens = fields["tokenizer.ggml.tokens"].contents()
    kinds = fields["tokenizer.ggml.token_type"].contents()
    found = pieces_in(text.read_text().replace(" ", "\u2581"), set(tokens))
    # Pieces of line ends stand across lines, and are few.
    keep = [
        i
        for i, (token, kind) in enumerate(zip(tokens, kinds))
        if i < FIRST or token in found or "\n" in token or kind in OTHER
    ]
    pruned(model, output, keep, None)
    print(f"{output.name}: {output.stat().st_size / 1e6:.1f} MB, {len(keep)} tokens")


if __name__ == "__main__":
    main()
