#!/usr/bin/env python3
"""Writes a small model and a short text, for tests that do not depend on a model's quality.

    tests/small_model.py MODEL LAYERS TOKENS NEURONS OUT.gguf TEXT.txt

The model has the first LAYERS layers of a GGUF file, the first TOKENS tokens of its vocabulary and
the first NEURONS neurons of each layer's FFN; all other metadata stays. Merges have the order of
the tokens that they make, so the first tokens and the first merges are a vocabulary, too. It loads
in a fifth of the time. Vocabulary and FFN take most of a token's time, and do not use the cache.

TEXT.txt gets the beginning of the text that scripts/fetch.py makes, because every command reads and
tokenises its whole text.
"""

import mmap
import os
import pathlib
import re
import struct
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "scripts"))
import fetch  # noqa: E402

TEXT_BYTES = 40960
ALIGNMENT = 32  # for a file without general.alignment
STRING, ARRAY = 8, 9
LISTS = b"tokenizer.ggml."
SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # type: bytes


class Reader:
    def __init__(self, data):
        self.data, self.at = data, 0

    def number(self, kind):
        (value,) = struct.unpack_from("<" + kind, self.data, self.at)
        self.at += struct.calcsize("<" + kind)
        return value

    def string(self):
        n = self.number("Q")
        self.at += n
        return self.data[self.at - n : self.at]

    def skip_value(self, kind):
        if kind == STRING:
            self.string()
        elif kind == ARRAY:
            kind, n = self.number("I"), self.number("Q")
            if kind in SCALARS:
                self.at += n * SCALARS[kind]
            else:
                for _ in range(n):
                    self.skip_value(kind)
        else:
            self.at += SCALARS[kind]


def aligned(n):
    return -(-n // ALIGNMENT) * ALIGNMENT


def pairs_of(reader, n_pairs):
    """(key, bytes before the value, the value's bytes) of each pair."""
    for _ in range(n_pairs):
        start = reader.at
        key, kind = reader.string(), reader.number("I")
        value = reader.at
        reader.skip_value(kind)
        if key == b"general.alignment":
            sys.exit("small_model.py: a file with an alignment of its own")
        yield key, reader.data[start:value], reader.data[value : reader.at]


def beginning(array, n):
    """The first n elements of an array."""
    reader = Reader(array)
    kind, _ = reader.number("I"), reader.number("Q")
    start = reader.at
    for _ in range(n):
        reader.skip_value(kind)
    return struct.pack("<IQ", kind, n) + array[start : reader.at]


def strings(array):
    reader = Reader(array)
    reader.at = 4
    return [reader.string() for _ in range(reader.number("Q"))]


def merges_of(tokens, merges, n_tokens):
    """The number of merges that make the first n_tokens tokens. Later merges have to make later
    tokens.
    """
    n = len(merges) - (len(tokens) - n_tokens)
    if n <= 0 or [merge.replace(b" ", b"") for merge in merges[n:]] != tokens[n_tokens:]:
        sys.exit("small_model.py: a vocabulary whose tokens are not in the order of its merges")
    return n


def metadata(reader, n_pairs, sizes):
    """The same pairs, except for the numbers of layers and neurons and the vocabulary."""
    n_layers, n_tokens, n_neurons = sizes
    pairs = list(pairs_of(reader, n_pairs))
    values = {key: value for key, _, value in pairs}
    tokens, merges = (strings(values[LISTS + name]) for name in (b"tokens", b"merges"))
    lengths = {LISTS + b"merges": merges_of(tokens, merges, n_tokens)}
    lengths |= {LISTS + name: n_tokens for name in (b"tokens", b"token_type", b"scores")}
    numbers = {
        b"block_count": n_layers,
        b"vocab_size": n_tokens,
        b"feed_forward_length": n_neurons,
    }
    for key, before, value in pairs:
        if key in lengths:
            value = beginning(value, lengths[key])
        elif (name := key.rpartition(b".")[2]) in numbers:
            value = struct.pack("<I", numbers[name])
        yield before + value


def tensors(reader, n):
    """[name, bytes of dimensions and type, offset, size]; the size of the last tensor is the rest
    of the file.
    """
    found = []
    for _ in range(n):
        name, start = reader.string(), reader.at
        n_dims = reader.number("I")
        reader.at += 8 * n_dims + 4
        found.append([name, reader.data[start : reader.at], reader.number("Q"), 0])
    base = aligned(reader.at)
    ordered = sorted(found, key=lambda tensor: tensor[2])
    for tensor, after in zip(ordered, [*[t[2] for t in ordered[1:]], len(reader.data) - base]):
        tensor[3] = after - tensor[2]
    return found, base


def kept(name, shape, size, n_tokens, n_neurons):
    """(columns, rows, bytes of a kept row, bytes of a row) of a matrix: its first columns and rows
    stay.
    """
    _, columns, rows, _ = struct.unpack("<IQQI", shape)
    row, more = size // rows, columns
    if name in (b"token_embd.weight", b"output.weight"):
        rows = n_tokens
    elif name.endswith((b"ffn_gate.weight", b"ffn_up.weight")):
        rows = n_neurons
    elif name.endswith(b"ffn_down.weight"):
        more = n_neurons
    return more, rows, row * more // columns, row


def shortened(tensor, data, base, n_tokens, n_neurons):
    """[name, bytes of dimensions and type, weights]."""
    name, shape, offset, size = tensor
    data = data[base + offset : base + offset + size]
    if struct.unpack_from("<I", shape)[0] != 2:
        return [name, shape, data]
    columns, rows, n, row = kept(name, shape, size, n_tokens, n_neurons)
    data = data[: rows * row]
    if n < row:
        data = b"".join(data[i * row : i * row + n] for i in range(rows))
    return [name, struct.pack("<IQQ", 2, columns, rows) + shape[-4:], data]


def cut(data, n_layers, n_tokens, n_neurons, out):
    reader = Reader(data)
    reader.at = 4
    version, n_tensors, n_pairs = reader.number("I"), reader.number("Q"), reader.number("Q")
    pairs = list(metadata(reader, n_pairs, (n_layers, n_tokens, n_neurons)))
    found, base = tensors(reader, n_tensors)
    layer = re.compile(rb"blk\.(\d+)\.")
    found = [t for t in found if not (m := layer.match(t[0])) or int(m[1]) < n_layers]
    found = [shortened(tensor, data, base, n_tokens, n_neurons) for tensor in found]
    out.write(data[:4] + struct.pack("<IQQ", version, len(found), n_pairs) + b"".join(pairs))
    at = 0
    for name, shape, weights in found:
        out.write(struct.pack("<Q", len(name)) + name + shape + struct.pack("<Q", at))
        at += aligned(len(weights))
    for _, _, weights in found:
        out.write(bytes(aligned(out.tell()) - out.tell()) + weights)


def main():
    if len(sys.argv) != 7:
        sys.exit("usage: small_model.py MODEL LAYERS TOKENS NEURONS OUT.gguf TEXT.txt")
    model, *sizes = sys.argv[1], *map(int, sys.argv[2:5])
    path, text = map(pathlib.Path, sys.argv[5:])
    part = path.with_name(path.name + ".part")
    with (
        open(model, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        open(part, "wb") as out,
    ):
        cut(data, *sizes, out)
    os.replace(part, path)
    whole = fetch.fetch_text().read_text(encoding="utf-8")
    text.write_text(whole[: whole.rindex("\n", 0, TEXT_BYTES) + 1], encoding="utf-8")


if __name__ == "__main__":
    main()
