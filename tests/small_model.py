#!/usr/bin/env python3
"""Writes a model of few layers, and a short text, for tests of what does not depend on a model's quality.

    tests/small_model.py MODEL LAYERS OUT.gguf TEXT.txt

The model is the first LAYERS layers of a GGUF file, with its vocabulary, embeddings and metadata as they are: a token takes a third
of the time. TEXT.txt gets the beginning of the text that scripts/fetch.py makes, because every command reads and tokenises all of
what it is given.
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
ALIGNMENT = 32  # of a file without general.alignment
STRING, ARRAY = 8, 9
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


def metadata(reader, n_pairs, n_layers):
    """The pairs as they are; only the number of layers changes."""
    for _ in range(n_pairs):
        start = reader.at
        key, kind = reader.string(), reader.number("I")
        value = reader.at
        reader.skip_value(kind)
        if key == b"general.alignment":
            sys.exit("small_model.py: a file with an alignment of its own")
        pair = reader.data[start : reader.at]
        yield pair[: value - start] + struct.pack("<I", n_layers) if key.endswith(b".block_count") else pair


def tensors(reader, n):
    """[name, bytes of dimensions and type, offset, size]; the last one's size is what is left."""
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


def cut(data, n_layers, out):
    reader = Reader(data)
    reader.at = 4
    version, n_tensors, n_pairs = reader.number("I"), reader.number("Q"), reader.number("Q")
    pairs = list(metadata(reader, n_pairs, n_layers))
    found, base = tensors(reader, n_tensors)
    layer = re.compile(rb"blk\.(\d+)\.")
    kept = [t for t in found if not (m := layer.match(t[0])) or int(m[1]) < n_layers]
    out.write(data[:4] + struct.pack("<IQQ", version, len(kept), n_pairs) + b"".join(pairs))
    at = 0
    for name, shape, _, size in kept:
        out.write(struct.pack("<Q", len(name)) + name + shape + struct.pack("<Q", at))
        at += aligned(size)
    for _, _, offset, size in kept:
        out.write(bytes(aligned(out.tell()) - out.tell()))
        out.write(data[base + offset : base + offset + size])


def main():
    if len(sys.argv) != 5:
        sys.exit("usage: small_model.py MODEL LAYERS OUT.gguf TEXT.txt")
    model, n_layers, path, text = sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3]), pathlib.Path(sys.argv[4])
    part = path.with_name(path.name + ".part")
    with open(model, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data, open(part, "wb") as out:
        cut(data, n_layers, out)
    os.replace(part, path)
    whole = fetch.fetch_text().read_text(encoding="utf-8")
    text.write_text(whole[: whole.rindex("\n", 0, TEXT_BYTES) + 1], encoding="utf-8")


if __name__ == "__main__":
    main()
