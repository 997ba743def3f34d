#!/usr/bin/env python3
"""Makes the input of bench/long_contexts.py for a machine without a tokenizer: token ids, and on
request a smaller model.

    bench/long_prepare.py -m model.gguf -f judged.txt --calibration calibration.txt -c 8192 \\
        -o FOLDER [--prune 12000]

FOLDER gets NAME.gguf and NAME.npz with three things: contexts of the judged text, tokens to
calibrate with, and needles. The option --prune N keeps only rows of the embedding whose tokens are
used here, and the first N. The rest of the model stays bit for bit. Probabilities are then over the
tokens that are left. The option --round N also rounds feed-forward and output matrices, as Q8_0
does, to multiples of a row's root mean square / N. The file then compresses to about log2(N) + 2
bits per weight. Attention stays unchanged.

Needles follow RULER and OCTOPUS (its appendix H): sentences "The special magic value of KEY is
VALUE." between the judged text's tokens. The kind `single` has one key and a number of 5 digits.
The kind `multi` has five keys and a question for one of them (RULER). The kind `chars` has values
of 8 random characters (OCTOPUS). The needle that the question is about stands at 5 depths, 0 to 1.

--reading makes another kind in LongBench's form: a part of the text, a question in other words, an
answer. `without` are the same questions after a part that has no answer.
"""

import argparse
import csv
import os
import pathlib
import random
import re
import string

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, dequantize
from tokenizers import Tokenizer, models, normalizers
from transformers import AutoTokenizer

CONTROL = 3  # a kind of piece that no text holds
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
KEYS = (
    "amber harbour",
    "copper lantern",
    "silver orchard",
    "quiet meadow",
    "golden compass",
    "velvet canyon",
    "frozen anchor",
    "hollow thunder",
    "crimson ladder",
    "gentle glacier",
    "paper falcon",
    "marble window",
)


def sentence_pieces(reader):
    """The tokenizer of a GGUF whose pieces have scores (Gemma). transformers makes another
    tokenizer of them. Pieces are merged best score first."""
    pieces = reader.fields["tokenizer.ggml.tokens"].contents()
    scores = reader.fields["tokenizer.ggml.scores"].contents()
    kinds = reader.fields["tokenizer.ggml.token_type"].contents()
    places = {piece: i for i, (piece, kind) in enumerate(zip(pieces, kinds)) if kind != CONTROL}
    merges = [
        (scores[i], piece[:at], piece[at:])
        for piece, i in places.items()
        if len(piece) > 1
        for at in range(1, len(piece))
        if piece[:at] in places and piece[at:] in places
    ]
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
        self.first = (
            [reader.fields["tokenizer.ggml.bos_token_id"].contents()]
            if first and first.contents()
            else []
        )
        self.size = len(reader.fields["tokenizer.ggml.tokens"].contents())

    def __call__(self, text):
        if self.pieces:
            lines = self.pieces.encode_batch(text.splitlines(keepends=True))
            return np.array([i for line in lines for i in line.ids], np.int32)
        return np.array(self.tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)


def contexts(ids, length, n, first):
    parts = (
        np.stack(np.split(ids[: n * length], n))
        if len(ids) >= n * length
        else np.zeros((0, length), np.int32)
    )
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
    asked = (
        f"\n\nQuestion: What is the special magic value of {keys[0]}?"
        f"\nAnswer: The special magic value of {keys[0]} is"
    )
    question, answer = words(asked), words(f" {values[0]}")
    hidden = [
        words(f"\nThe special magic value of {key} is {value}.\n")
        for key, value in zip(keys, values)
    ]
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
            texts = [
                needle(words, ids, kind, length, depth, random_)
                for _ in range(n)
                for depth in DEPTHS
            ]
            made[f"needle_{kind}_{length}"] = np.stack([tokens for tokens, _ in texts])
            made[f"answers_{kind}_{length}"] = np.array([answer for _, answer in texts], np.int32)
    return made


def reading(words, text, ids, lengths):
    """Texts with the questions of bench/reading.csv, in the form of needles. The answer is at each
    of 5 depths."""
    with open(pathlib.Path(__file__).with_name("reading.csv"), newline="") as file:
        questions = list(csv.DictReader(file, delimiter="|"))
    ends = [text.index(row["evidence"]) for row in questions]
    sizes = {
        end: len(words(text[start:end])) for start, end in zip([0, *sorted(ends)], sorted(ends))
    }
    places, made = [sum(n for other, n in sizes.items() if other <= end) for end in ends], {}
    for kind, shift in (("reading", 0), ("without", len(ids) // 2)):
        for length in lengths:
            texts, answers = [], []
            for i, (row, place) in enumerate(zip(questions, places)):
                asked = words(f"\n\nQuestion: {row['question']}\nAnswer: {row['begin']}")
                answer = words(f" {row['answer']}")
                room = length - len(asked) - len(answer) - len(words.first)
                start = (place + shift) % len(ids) - int(
                    (0.02 + 0.96 * DEPTHS[i % len(DEPTHS)]) * (room - 64)
                )
                start = min(max(start, 0), len(ids) - room)
                texts.append(
                    np.concatenate(
                        [np.array(words.first, np.int32), ids[start : start + room], asked, answer]
                    )
                )
                answers.append(len(answer))
            made |= {
                f"needle_{kind}_{length}": np.stack(texts),
                f"answers_{kind}_{length}": np.array(answers, np.int32),
            }
    return made


def rounded(data, kind, steps):
    """A matrix as Q8_0 whose rows have one scale."""
    x = dequantize(data, kind).astype(np.float32)
    scale = (np.sqrt(np.mean(x * x, 1, keepdims=True)) / steps).astype(np.float16)
    codes = (
        np.clip(np.rint(x / scale.astype(np.float32)), -127, 127)
        .astype(np.int8)
        .reshape(len(x), -1, 32)
    )
    scales = np.repeat(scale[:, None], codes.shape[1], 1).view(np.uint8)
    return np.concatenate([scales, codes.view(np.uint8)], 2).reshape(len(x), -1)


def pruned(model, output, keep, steps, merges=None, change=None):
    """The same GGUF with the rows `keep` of its embedding and output matrices. With merges, the
    tokenizer has these. change(name, data, kind) returns other data and its kind."""
    places = {token: place for place, token in enumerate(keep)}
    reader = GGUFReader(model)
    name = reader.fields["general.architecture"]
    writer = GGUFWriter(output, arch=bytes(name.parts[name.data[0]]).decode())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kind, value = field.types[0], field.contents()
        inner = field.types[-1] if kind == GGUFValueType.ARRAY else None
        if field.name == "tokenizer.ggml.merges":
            value = merges
        if value is None or (field.name == "tokenizer.chat_template" and merges is None):
            continue
        if field.name.endswith("_token_id"):
            value = places.get(value)
            if value is None:
                continue
        if field.name in (
            "tokenizer.ggml.tokens",
            "tokenizer.ggml.scores",
            "tokenizer.ggml.token_type",
        ):
            value = [value[i] for i in keep]
        writer.add_key_value(field.name, value, kind, inner)
    for tensor in reader.tensors:
        data = (
            tensor.data[keep]
            if tensor.name in ("token_embd.weight", "output.weight")
            else tensor.data
        )
        kind = tensor.tensor_type
        if steps and (
            tensor.name == "output.weight" or re.search(r"ffn_(up|gate|down)\.weight", tensor.name)
        ):
            data, kind = rounded(data, kind, steps), GGMLQuantizationType.Q8_0
        if change:
            data, kind = change(tensor.name, data, kind)
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def renumbered(arrays, extra):
    """The used token ids and the first `extra`, in order; arrays' ids become places in them."""
    used = [arrays[name].ravel() for name in arrays if not name.startswith("answers")]
    keep = np.union1d(np.concatenate(used), np.arange(extra))
    return keep, {
        name: x if name.startswith("answers") else np.searchsorted(keep, x).astype(np.int32)
        for name, x in arrays.items()
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model", required=True, type=pathlib.Path)
    parser.add_argument("-f", "--text", required=True, type=pathlib.Path)
    parser.add_argument("--calibration", required=True, type=pathlib.Path)
    parser.add_argument("-c", "--ctx", type=int, default=8192)
    parser.add_argument("--contexts", type=int, default=4)
    parser.add_argument("--needles", default="2048,8192", help="lengths of texts, with commas")
    parser.add_argument("--trials", type=int, default=4, help="texts per depth")
    parser.add_argument(
        "--reading",
        action="store_true",
        help="questions of bench/reading.csv, about WikiText-2's wiki.test.raw",
    )
    parser.add_argument("--prune", type=int, metavar="N")
    parser.add_argument("--round", type=float, metavar="N", help="with --prune")
    parser.add_argument("-o", "--output", required=True, type=pathlib.Path)
    a = parser.parse_args()
    a.output.mkdir(parents=True, exist_ok=True)
    words = Words(a.model)
    ids = words(a.text.read_text())
    arrays = {
        "contexts": contexts(ids, a.ctx, a.contexts, words.first),
        "calibration": words(a.calibration.read_text()[:200000])[:8192],
    }
    lengths = [int(n) for n in a.needles.split(",")]
    arrays |= needles(words, ids, lengths, a.trials)
    if a.reading:
        arrays |= reading(words, a.text.read_text(), ids, lengths)
    file, vocabulary = a.output / a.model.name, words.size
    if a.prune is not None:
        keep, arrays = renumbered(arrays, a.prune)
        pruned(a.model, file, keep, a.round)
        vocabulary = len(keep)
    elif not file.exists():
        os.symlink(a.model.resolve(), file)
    np.savez_compressed(file.with_suffix(".npz"), **arrays)
    print(
        f"{file.name}: {file.stat().st_size / 1e6:.1f} MB, {vocabulary} tokens, {len(ids)} of "
        "text, "
        f"{', '.join(f'{name} {x.shape}' for name, x in arrays.items())}"
    )


if __name__ == "__main__":
    main()
