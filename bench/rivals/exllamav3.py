#!/usr/bin/env python3
"""Judges what exllamav3's own cache kernels make of captured keys and values. They run on a GPU
(exllamav3.cu); the rest needs NumPy, libkvant and no GPU. ideas.py computes the errors, from
the same captures and for the same queries. exllamav3 stores one fp16 scale for 32 numbers.

    python3 bench/rivals/exllamav3.py rows --layers 4,15 S.safetensors > rows.f16
    for bits in 2 3 4; do ./exllamav3 $bits < rows.f16 > S.$bits.f16; done    # on the GPU
    python3 bench/rivals/exllamav3.py judge --layers 4,15 --append bench/results/rivals_ideas.csv \\
        SmolLM2-135M=S.safetensors:1e5,i S.[2-4].f16
"""

import pathlib
import re
import sys

import ideas
import numpy as np
import record

from kvant.tuning.captures import Capture

SCALE_BITS = 16 / 32


def heads_of(path, layers):
    """The heads of a capture's first context, layer by layer."""
    with Capture(path) as capture:
        for layer in layers:
            yield from ideas.heads_of(capture, layer, 1)


def rows(path, layers):
    for _, keys, values, _ in heads_of(path, layers):
        for some in (keys, values):
            sys.stdout.buffer.write(np.ascontiguousarray(some, np.float16).tobytes())


def restored(file, shape):
    n = int(np.prod(shape))
    data = np.frombuffer(file.read(2 * n), np.float16)
    if len(data) != n:
        sys.exit(f"exllamav3: {file.name} has fewer rows than the capture's layers")
    return data.reshape(shape).astype("f4")


def errors_of(path, layers, decoded):
    """{role: errors of the heads}."""
    found = {"k": [], "v": []}
    with decoded.open("rb") as file:
        for _, keys, values, heads in heads_of(path, layers):
            for role, exact in (("k", keys), ("v", values)):
                made = restored(file, exact.shape)
                found[role] += [head.error(role, row) for head, row in zip(heads, made)]
    return found


def judge(options):
    model, _, rest = options.capture.partition("=")
    path, _, rope = rest.rpartition(":")
    found, _ = ideas.judge(path, ideas.Rope(rope), options.layers, 1)
    about = record.context(["exllamav3.py", "judge", f"{model}={pathlib.Path(path).name}:{rope}"])
    made = []
    for decoded in options.decoded:
        bits = int(re.search(r"\.(\d)\.f16$", decoded.name)[1])
        true = bits + SCALE_BITS
        if true > ideas.MOST_BITS:
            sys.exit(f"exllamav3: {decoded}: trellis has at most {ideas.MOST_BITS} bits here")
        for role, errors in errors_of(path, options.layers, decoded).items():
            ours = np.array(errors)
            trellis = ideas.at_bits(found, role, true, len(ours))
            made.append(
                ideas.line(model, role, f"exllamav3, {bits} bits", true, 0, ours, trellis, about)
            )
            print(*list(made[-1].values())[:13], flush=True)
    if options.append:
        record.append(options.append, made)


def main():
    parser = record.options_of(__doc__)
    parser.add_argument("what", choices=("rows", "judge"))
    parser.add_argument("--layers", type=ideas.layers_of, required=True)
    parser.add_argument("--append", type=pathlib.Path)
    parser.add_argument("capture")
    parser.add_argument("decoded", nargs="*", type=pathlib.Path)
    options = parser.parse_args()
    if options.what == "rows":
        rows(options.capture, options.layers)
    else:
        judge(options)


if __name__ == "__main__":
    main()
