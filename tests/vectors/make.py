#!/usr/bin/env python3
"""Makes vectors.txt, the bytes that every codec must write and the numbers that it must decode, by
an implementation that shares nothing with the library. It was written in NumPy from format.md and
the papers. The test tests/unit/test_vectors.c compares.

    make.py           writes vectors.txt and vectors.kvcal next to this script
    make.py --check   exits with 1 when a file differs from its new content
"""

import pathlib
import sys

import numpy as np

import calibrated
import hqmq
import octopus
import polar
import trellis
import turboquant
import uniform
from arithmetic import F32, SplitMix64
from layout import TOKENS, pad_to
from transform import Ordered, Rotation, largest_power_of_two

FOLDER = pathlib.Path(__file__).parent
SEED = 42
UNIFORM = ("int", "bdr", "kivi", "innerq")

HEADER = """\
# Made by make.py. A line is a page: spec, head_dim, role, seed, setting, FNV-1a (64 bits) of the
# code plane, of the metadata plane and of the whole page, page bytes, then decoded numbers as
# token:channel=value. The setting is 0, 1 with make.py's affine(), or 2 with kv head 1 of layer 0
# of vectors.kvcal. make.py's rows() makes the rows.
"""

SPECS = """
f32 f16 bf16
int-2 int-3 int-4 int-5 int-6 int-7 int-8 int-4:sym int-2:sym int-8:sym int-4:group=16
int-3:group=16,sym
int-4:axis=channel int-2:axis=channel,group=16 int-3:axis=channel,group=64,sym int-4:rotate=dense
int-2:axis=channel,rotate=hadamard
int-4:group=32 int-3:group=32,hybrid int-2:group=16,hybrid=code int-2:axis=channel,hybrid
kivi-2 kivi-4:group=16 innerq-base innerq-hybrid innerq-small innerq-hybrid:hybrid=code,group=64
bdr-4 bdr-4:block=16 bdr-4:signs=seed bdr-2:group=16
turboquant-1 turboquant-2 turboquant-3 turboquant-4 turboquant-5 turboquant-6 turboquant-7
turboquant-8
turboquant-4:scale=norm turboquant-3:rotate=dense turboquant-3:rotate=none
turboquant-2.5 turboquant-3.5 turboquant-2.5:scale=norm
turboquant-1:qjl turboquant-3:qjl turboquant-3:qjl,sketch=gaussian
trellis-2 trellis-3 trellis-4 trellis-4:scale=norm trellis-2:rotate=none
polar-2 polar-3 polar-4 polar-4:scale=norm polar-3:rotate=none
polar-3.9 polar-3.9:scale=norm
octopus-1 octopus-2 octopus-3 octopus-4 octopus-2:round=scalar octopus-3:round=2x2
octopus-2:round=full
octopus-3:round=next,pad=zero,scale=norm octopus-2:round=next octopus-4:pad=zero
octopus-3:scale=norm octopus-3:split=3.3 octopus-2:qjl
hqmq-s24r3 hqmq-s96r4 hqmq-s170r4:scale=norm,book=random hqmq-s192r6:rotate=hadamard
hqmq-s96r4:med3 hqmq-s5r2:med=2,slots=1
hqmq-s96r4:med3,median=page hqmq-s24r6:med=2,median=page,range=all,slots=8,scale=norm
naive-4 naive-3:med=1,range=all,slots=16 naive-6:med=3,slots=100
int-4:group=16,order=pairs bdr-4:block=16,order=dealt innerq-base:order=halves
hqmq-s96r4:order=halves hqmq-s24r3:order=dealt
spherical-r4jl4 spherical-r5jl7:scale=unbiased,rotate=dense addvq-k24r3 addvq-k24r3:search=greedy
""".split()
AFFINE = ["int-4", "turboquant-4"]
CALIBRATED = """
kmeans-4:c=1 kmeans-4:c=4 kmeans-3:c=4,block=16,group=16 hessian-4
hessian-4:block=16,pool=layer hessian-3:order=eigen,group=8
hessian-4:rotate=none
turboquant-4:transform=file turboquant-3:transform=diagonal int-4:transform=file,rotate=none
int-4:transform=diagonal,axis=channel int-3:transform=file,rotate=dense
turboquant-4:transform=file,feedback turboquant-3:transform=file,feedback,scale=norm
turboquant-6:transform=file,feedback
""".split()
PLAIN, SHIFTED, WITH_FILE = 0, 1, 2


def rows(dim):
    """Rows that are exact in binary32: 16-bit integers over powers of two from 2^8 to 2^23. The
    rows have a heavy tail.

    Token 5 is zero, token 6 is tiny, token 7 has the same number everywhere.
    """
    generator = SplitMix64(dim)
    x = np.array([number(generator.next()) for _ in range(TOKENS * dim)], F32).reshape(TOKENS, dim)
    x[5] = 0
    x[6] *= F32(2.0**-100)
    x[7] = 1.5
    return x


def number(word):
    return ((word >> 40 & 0xFFFF) - 32768) / 2.0 ** (8 + (word >> 60))


def affine(dim):
    """A centre and scales, which are powers of two, so that dividing is exact in any
    implementation.
    """
    i = np.arange(dim)
    return (i % 7 - 3).astype(F32) / F32(4), F32(2) ** (i % 5 - 2).astype(F32)


def parse(spec):
    name, _, text = spec.partition(":")
    family, _, bits = name.partition("-")
    options = dict(o.split("=", 1) if "=" in o else (o, "") for o in text.split(",") if o)
    return family, bits, options


def rotation_of(family, bits, options, dim, seed):
    rotated = "dense" if dim & (dim - 1) else "hadamard"
    default = {
        "bdr": "hadamard",
        "turboquant": rotated,
        "trellis": rotated,
        "polar": rotated,
        "octopus": rotated,
    }
    default = "none" if bits.endswith(".5") else default.get(family, "none")
    kind = options.get("rotate", default)
    limit = 128 if family in UNIFORM else dim
    block = int(options.get("block", largest_power_of_two(dim, limit)))
    signed = options.get("signs", "none" if family in UNIFORM else "seed") == "seed"
    return Rotation(kind, dim, seed, block, signed)


def encode_raw(y, family):
    if family == "f32":
        return y.astype("<f4").tobytes(), b"", y
    if family == "f16":
        return y.astype("<f2").tobytes(), b"", y.astype(np.float16).astype(F32)
    word = y.view(np.uint32).astype(np.uint64)
    word = (word + 0x7FFF + (word >> 16 & 1)) >> 16
    return word.astype("<u2").tobytes(), b"", (word << 16).astype(np.uint32).view(F32)


def encode(y, role, spec, seed, feedback=None):
    family, bits, options = parse(spec)
    if family in ("f32", "f16", "bf16"):
        return encode_raw(y, family)
    if family in UNIFORM:
        return uniform.encode(y, family, bits, role, options)
    if family == "naive":
        return hqmq.encode_naive(y, int(bits), role, options)
    if family in hqmq.BOOKS:
        return hqmq.encode(y, family, bits, role, options, seed)
    if family == "octopus":
        return octopus.encode(y, bits, role, options, seed)
    if family == "polar":
        return polar.encode(y, bits, role, options)
    if family == "trellis":
        return trellis.encode(y, int(bits), role, options)
    return turboquant.encode(y, bits, role, options, seed, feedback)


def fnv1a(data):
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 & (1 << 64) - 1
    return f"{value:016x}"


def samples(decoded):
    """Eight numbers, among them some of the special rows."""
    dim = decoded.shape[1]
    where = [
        (0, 0),
        (1, dim - 1),
        (5, 3),
        (6, 2),
        (7, dim // 2),
        (17, 5),
        (40, dim - 7),
        (63, dim // 3),
    ]
    return " ".join(f"{t}:{c}={decoded[t, c]:.9g}" for t, c in where)


def encode_rows(x, role, spec, setting):
    """Returns the code plane, the metadata plane and the decoded rows."""
    family, bits, options = parse(spec)
    rotation = rotation_of(family, bits, options, x.shape[1], SEED)
    if "order" in options and role == "K":
        rotation = Ordered(rotation, options["order"], x.shape[1])
    if setting == WITH_FILE and "transform" in options:
        feedback = calibrated.Feedback(rotation) if "feedback" in options and role == "K" else None
        weighting = calibrated.Weighting(options["transform"], role, rotation, feedback is not None)
        code, metadata, decoded = encode(weighting.apply(x), role, spec, SEED, feedback)
        return code, metadata, weighting.undo(decoded)
    if setting == WITH_FILE:
        return calibrated.encode(x, family, bits, role, options, SEED)
    if setting == PLAIN:
        code, metadata, decoded = encode(rotation.apply(x), role, spec, SEED)
        return code, metadata, rotation.undo(decoded)
    center, scale = affine(x.shape[1])
    code, metadata, decoded = encode(rotation.apply((x - center) / scale), role, spec, SEED)
    return code, metadata, center + scale * rotation.undo(decoded)


def line(spec, dim, role, setting=PLAIN):
    code, metadata, decoded = encode_rows(rows(dim), role, spec, setting)
    code = pad_to(code, 16)
    page = pad_to(code + metadata, 64)
    hashes = f"{fnv1a(code)} {fnv1a(metadata)} {fnv1a(page)}"
    head = f"{spec} {dim} {role} {SEED} {setting} {hashes} {len(page)}"
    return f"{head} {samples(decoded)}\n"


def lines():
    yield HEADER
    for spec in SPECS:
        for dim in (128, 80):
            for role in "KV":
                yield line(spec, dim, role)
    for spec in AFFINE:
        yield line(spec, 64, "K", SHIFTED)
    for spec in CALIBRATED:
        for role in "KV":
            yield line(spec, calibrated.DIM, role, WITH_FILE)


def made():
    """Returns name and content of every file."""
    calibration = calibrated.CALIBRATION.file(lambda data: int(fnv1a(data), 16))
    return {"vectors.txt": "".join(lines()).encode(), "vectors.kvcal": calibration}


def main():
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit(__doc__)
    for name, content in made().items():
        if not sys.argv[1:]:
            (FOLDER / name).write_bytes(content)
        elif (FOLDER / name).read_bytes() != content:
            sys.exit(f"{name} is not what make.py makes")


if __name__ == "__main__":
    main()
