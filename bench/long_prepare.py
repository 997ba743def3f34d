#!/usr/bin/env python3
"""Makes what bench/long_contexts.py reads, for a machine without a tokenizer: token ids, and on request a smaller model.

    bench/long_prepare.py -m model.gguf -f judged.txt --calibration calibration.txt -c 8192 -o FOLDER [--prune 12000]

FOLDER gets NAME.gguf and NAME.npz: contexts of the judged text, tokens to calibrate with, and needles. --prune N keeps only
the rows of the embedding whose tokens are used here, and the first N; everything else of the model stays bit for bit. Then
probabilities are those over the tokens that are left.

Needles follow RULER and OCTOPUS (its appendix H): sentences "The special magic value of KEY is VALUE." between the judged
text's tokens. single: one key, a number of 5 digits. multi: five keys, one of which is asked for (RULER). chars: values of 8
random characters (OCTOPUS). The asked one stands at 5 depths, 0 to 1.
"""

import argparse
import os
import pathlib
import random
import string

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from tokenizers import Tokenizer, models, normalizers
from transformers import AutoTokenizer

CONTROL = 3  # a kind of piece that no text holds
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
KEYS = ("amber harbour", "copper lantern", "silver orchard", "quiet meadow", "golden compass", "velvet canyon", "frozen anchor",
        "hollow thunder", "crimson ladder", "gentle glacier", "paper falcon", "marble window")


def sentence_pieces(reader):
    """The tokenizer of a GGUF whose pieces have scores (Gemma): transformers makes another one of these. Pieces are merged
    best score first."""
    pieces = reader.fields["tokenizer.ggml.tokens"].contents()
    scores = reader.fields["tokenizer.ggml.scores"].contents()
    kinds = reader.fields["tokenizer.ggml.token_type"].contents()
    places = {piece: i for i, (piece, kind) in enumerate(zip(pieces, kinds)) if kind != CONTROL}
    merges = [(scores[i], piece[:at], piece[at:]) for piece, i in places.items() if len(piece) > 1 for at in range(1, len(piece))
              if piece[:at] in places and piece[at:] in places]
    merges.sort(key=lambda merge: -merge[0])
    made = Tokenizer(models.BPE(places, [merge[1:] for merge in merges], byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", "\u2581")
    return made


class Words:
    """A tokenizer whose pieces are joined, so that needles are the same tokens everywhere."""

    def __init__(self, model):
        reader = GGUFReader(model)
        self.pieces = None
        if reader.fields["tokenizer.ggml.model"].contents() == "llama":
            self.pieces = sentence_pieces(reader)
        else:
            self.tokenizer = AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name)
        first = reader.fields.get("tokenizer.ggml.add_bos_token")
        self.first = [reader.fields["tokenizer.ggml.bos_token_id"].contents()] if first and first.contents() else []
        self.size = len(reader.fields["tokenizer.ggml.tokens"].contents())

    def __call__(self, text):
        if self.pieces:
            lines = self.pieces.encode_batch(text.splitlines(keepends=True))
            return np.array([i for line in lines for i in line.ids], np.int32)
        return np.array(self.tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)


def contexts(ids, length, n, first):
    parts = np.stack(np.split(ids[: n * length], n)) if len(ids) >= n * length else np.zeros((0, length), np.int32)
    parts[:, : len(first)] = first
    return parts


def value_of(kind, random_):
    if kind == "chars":
        return "".join(random_.choices(string.ascii_lowercase + string.digits, k=8))
    return str(random_.randint(10000, 99999))


def needle(words, ids, kind, length, depth, random_):
    """Tokens of a text with its question and answer, and the answer's length."""
    keys = random_.sample(KEYS, 1 if kind == "single" else 5)
    values = [value_of(kind, random_) for _ in keys]
    asked = f"\n\nQuestion: What is the special magic value of {keys[0]}?\nAnswer: The special magic value of {keys[0]} is"
    question, answer = words(asked), words(f" {values[0]}")
    hidden = [words(f"\nThe special magic value of {key} is {value}.\n") for key, value in zip(keys, values)]
    room = length - len(question) - len(answer) - sum(map(len, hidden)) - len(words.first)
    start = random_.randrange(len(ids) - room)
    places = [depth] + [(i + random_.random()) / 4 for i in range(len(keys) - 1)]
    order = sorted(zip(places, range(len(keys))))
    parts, at = [np.array(words.first, np.int32)], 0
    for place, which in order:
        end = int(place * room)
        parts += [ids[start + at : start + end], hidden[which]]
        at = end
    parts += [ids[start + at : start + room], question, answer]
    return np.concatenate(parts), len(answer)


def needles(words, ids, lengths, n):
    made = {}
    for kind in ("single", "multi", "chars"):
        for length in lengths:
            random_ = random.Random(f"{kind} {length}")
            texts = [needle(words, ids, kind, length, depth, random_) for _ in range(n) for depth in DEPTHS]
            made[f"needle_{kind}_{length}"] = np.stack([tokens for tokens, _ in texts])
            made[f"answers_{kind}_{length}"] = np.array([answer for _, answer in texts], np.int32)
    return made


def pruned(model, output, keep):
    """The same GGUF with the rows `keep` of its embedding and output matrices."""
    reader = GGUFReader(model)
    name = reader.fields["general.architecture"]
    writer = GGUFWriter(output, arch=bytes(name.parts[name.data[0]]).decode())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kind, value = field.types[0], field.contents()
        inner = field.types[-1] if kind == GGUFValueType.ARRAY else None
        if field.name.startswith("tokenizer.ggml.merges") or field.name == "tokenizer.chat_template":
            continue
        if field.name in ("tokenizer.ggml.tokens", "tokenizer.ggml.scores", "tokenizer.ggml.token_type"):
            value = [value[i] for i in keep]
        writer.add_key_value(field.name, value, kind, inner)
    for tensor in reader.tensors:
        data = tensor.data[keep] if tensor.name in ("token_embd.weight", "output.weight") else tensor.data
        writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def renumbered(arrays, extra):
    """The used token ids and the first `extra`, in order; arrays' ids become places in them."""
    used = [arrays[name].ravel() for name in arrays if not name.startswith("answers")]
    keep = np.union1d(np.concatenate(used), np.arange(extra))
    return keep, {name: x if name.startswith("answers") else np.searchsorted(keep, x).astype(np.int32) for name, x in arrays.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", required=True, type=pathlib.Path)
    parser.add_argument("-f", "--text", required=True, type=pathlib.Path)
    parser.add_argument("--calibration", required=True, type=pathlib.Path)
    parser.add_argument("-c", "--ctx", type=int, default=8192)
    parser.add_argument("--contexts", type=int, default=4)
    parser.add_argument("--needles", default="2048,8192", help="lengths of texts, with commas")
    parser.add_argument("--trials", type=int, default=4, help="texts per depth")
    parser.add_argument("--prune", type=int, metavar="N")
    parser.add_argument("-o", "--output", required=True, type=pathlib.Path)
    a = parser.parse_args()
    a.output.mkdir(parents=True, exist_ok=True)
    words = Words(a.model)
    ids = words(a.text.read_text())
    arrays = {"contexts": contexts(ids, a.ctx, a.contexts, words.first),
              "calibration": words(a.calibration.read_text()[:200000])[:8192]}
    arrays |= needles(words, ids, [int(n) for n in a.needles.split(",")], a.trials)
    file, vocabulary = a.output / a.model.name, words.size
    if a.prune is not None:
        keep, arrays = renumbered(arrays, a.prune)
        pruned(a.model, file, keep)
        vocabulary = len(keep)
    elif not file.exists():
        os.symlink(a.model.resolve(), file)
    np.savez_compressed(file.with_suffix(".npz"), **arrays)
    print(f"{file.name}: {file.stat().st_size / 1e6:.1f} MB, {vocabulary} tokens, {len(ids)} of text, "
          f"{', '.join(f'{name} {x.shape}' for name, x in arrays.items())}")


if __name__ == "__main__":
    main()
