#!/usr/bin/env python3
"""A laboratory for what other programs do to a cache, tried with kvant's W and `trellis` inside, on
captured keys and values of real models. It needs NumPy and libkvant.

    kvant capture -m model.gguf -f text.txt -n 4096 -c 2048 --spread 2 --queries 8 -o S.safetensors
    python3 bench/rivals/ideas.py --append bench/results/rivals_ideas.csv \\
        SmolLM2-135M=S.safetensors:1e5,i

After the capture comes RoPE: its base, and i if pairs of channels are neighbours. A context's first
1024 tokens are what an idea learns from. Queries of later tokens judge. Keys: the KL divergence of
a head's softmax from the softmax of exact keys, with exact values. Values: the squared error of
attention's output relative to the output, with exact keys. The first 64 tokens stay exact.

Every head is compared with `trellis` at the idea's true bits, as bench/papers_ideas.py does. The
bits leave out what a head stores once, such as W; `once` has these bits. Ideas:

    W, N bits       the numbers of W's triangle below the diagonal are rounded to N bits per row
    evened          variances of a block's channels are evened before the codec (KVarN)
    resealed        codes of more bits are decoded and encoded again
    predicted       a linear map of the decoded layer below predicts the row, and the rest is coded
                    (AQUA-KV); `all tokens` and `later tokens` are lines of `trellis`, too
    entropy coded   uniform steps after W with an ideal entropy coder per channel (KVTC)
    by head         heads get 2 to 5 bits by their errors on the learned tokens, with the same mean
                    (RateQuant)
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import numpy as np  # noqa: E402
import record  # noqa: E402
from papers_ideas import (  # noqa: E402
    EXACT,
    LEARN,
    damped,
    interval,
    learned_w,
    log_softmax,
    root,
    rounded,
    scores_of,
)

from kvant.tuning.captures import Capture  # noqa: E402

BLOCK = 64
BITS = (2, 3, 4)
MOST_BITS = 5
COLUMN_BITS = 8  # of a channel's scale in a block
RIDGE = 1e-2
KNOWN = slice(EXACT, LEARN)
# Names of errors for heads whose layer below is known. Without LATER, tokens that an idea learned
# from count, too.
FROM_BELOW, LATER = ", all tokens", ", later tokens"


class Rope:
    """RoPE of all channels of a head."""

    def __init__(self, text):
        base, _, kind = text.partition(",")
        self.base, self.interleaved = float(base), kind == "i"

    def turn(self, rows, sign):
        """Rows [heads, tokens, dim], rotated by their positions."""
        dim = rows.shape[2]
        angles = np.arange(rows.shape[1])[:, None] * self.base ** (-np.arange(0, dim, 2) / dim)
        cos, sin = np.cos(angles), sign * np.sin(angles)
        first, second = (
            (slice(0, None, 2), slice(1, None, 2))
            if self.interleaved
            else (slice(0, dim // 2), slice(dim // 2, None))
        )
        out, a, b = np.empty_like(rows), rows[:, :, first], rows[:, :, second]
        out[:, :, first], out[:, :, second] = a * cos - b * sin, a * sin + b * cos
        return out


# W of one head


def triangle(w):
    """The lower triangle L with L L^T = W W^T. L is what a cache stores."""
    return np.linalg.cholesky(w @ w.T)


def in_few_bits(lower, bits):
    made = lower.copy()
    for i in range(1, len(lower)):
        step = np.abs(lower[i, :i]).max() / (2 ** (bits - 1) - 1)
        made[i, :i] = step * np.round(lower[i, :i] / step) if step > 0 else 0
    return made


def transform_of(rows, queries):
    """(centre, matrix) of keys with queries, of values without."""
    known = rows[KNOWN]
    if queries is None:
        moments = damped(known.T @ known / len(known), len(known), 0.25)
        return np.zeros(rows.shape[1]), triangle(root(moments, -0.25))
    centre = known.mean(0)
    return centre, triangle(learned_w(known - centre, queries)[0])


def coded(rows, transform, bits):
    centre, matrix = transform
    return rounded((rows - centre) @ matrix, bits) @ np.linalg.inv(matrix) + centre


# Ideas: name, true bits, bits that a head stores once, rows after the codec


def w_in_few_bits(rows, transform, bits, scale):
    centre, lower = transform
    dim = len(lower)
    for few in (8, 4, 2) if bits == 3 else ():
        once = few * np.count_nonzero(np.tril(lower, -1)) + 2 * 16 * dim
        made = coded(rows, (centre, in_few_bits(lower, few)), bits)
        yield f"W, {few} bits", bits + scale, once, made


def evened(rows, transform, bits, scale):
    """Each block's channels, after W, are divided by powers of their deviations in the block, so
    that these are evened in part (1/2) or whole (1)."""
    centre, lower = transform
    inner = (rows - centre) @ lower
    blocks = inner.reshape(-1, BLOCK, inner.shape[1])
    deviation = np.sqrt((blocks**2).mean(1, keepdims=True)) + 1e-9
    back = np.linalg.inv(lower)
    for power, name in ((0.5, "half"), (1, "whole")):
        steps = np.round(8 * np.log2(deviation**power)) / 8
        factor = 2.0**steps
        scaled = (blocks / factor).reshape(inner.shape)
        found = rounded(scaled, bits).reshape(blocks.shape) * factor
        more = COLUMN_BITS / BLOCK
        yield (
            f"evened, {name}",
            bits + scale + more,
            0,
            found.reshape(inner.shape) @ back + centre,
        )


def resealed(rows, transform, bits, scale):
    for path in {2: ((4, 3), (3,), (4,)), 3: ((4,),), 4: ()}[bits]:
        found = rows
        for step in path:
            found = coded(found, transform, step)
        name = "resealed from " + ", ".join(map(str, path))
        yield name, bits + scale, 0, coded(found, transform, bits)


def entropy(codes):
    """Bits per number of an ideal coder with a table for each channel, and the tables' bits."""
    n, low = len(codes), codes.min(0)
    bits = 0
    for channel in (codes - low).T:
        counts = np.bincount(channel)
        counts = counts[counts > 0]
        share = counts / n
        bits += -(share * np.log2(share)).sum() + (len(counts) - 1) / 2 * np.log2(n) / n
    return bits / codes.shape[1]


def entropy_coded(rows, transform, bits, scale):
    """One step for all numbers of a head, after W: the largest that needs no more bits than trellis
    with its scales. The channels are not rotated, so that tables can tell them apart."""
    centre, lower = transform
    inner = (rows - centre) @ lower
    low, high = (inner.std() * 2.0**power for power in (-9, 3))
    for _ in range(16):
        step = np.sqrt(low * high)
        codes = np.round(inner / step).astype(int)
        low, high = (low, step) if entropy(codes) < bits + scale else (step, high)
    found = np.round(inner / high) * high
    yield "entropy coded", bits + scale, 0, found @ np.linalg.inv(lower) + centre


IDEAS = {
    "W": w_in_few_bits,
    "evened": evened,
    "resealed": resealed,
    "entropy": entropy_coded,
}


# Judging


class Head:
    """A head's keys and values with the queries that judge them."""

    def __init__(self, keys, values, queries, positions, shape):
        self.keys, self.values, self.shape = keys.astype("f4"), values.astype("f4"), shape
        early, late = positions < LEARN, positions >= LEARN
        self.fit = queries[:, early & (positions >= EXACT)].reshape(-1, keys.shape[1])
        self.late = self.view(queries[:, late], positions[late])
        late[: np.flatnonzero(late)[-1] : 2] = False
        middle = early & (positions >= LEARN // 2)
        self.middle = self.view(queries[:, middle], positions[middle])

    def view(self, queries, positions):
        at = np.tile(positions, len(queries))[:, None]
        tokens = np.arange(len(self.keys))
        hidden = tokens > at
        if self.shape.window:
            hidden |= tokens <= at - self.shape.window
        queries = queries.reshape(-1, queries.shape[2]).astype("f4")
        scores = scores_of(queries, self.keys, self.shape)
        exact = log_softmax(np.where(hidden, -np.inf, scores))
        return queries, hidden, np.where(hidden, 0, exact), np.exp(exact)

    def error(self, role, rows, view=None, exact_tokens=EXACT):
        queries, hidden, exact, weights = view or self.late
        if role == "k":
            rows = np.concatenate([self.keys[:exact_tokens], rows[exact_tokens:]])
            found = log_softmax(np.where(hidden, -np.inf, scores_of(queries, rows, self.shape)))
            return (weights * np.where(hidden, 0, exact - found)).sum(1).mean()
        later = slice(exact_tokens, None)
        wrong = weights[:, later] @ (rows[later] - self.values[later])
        return (wrong**2).sum() / ((weights @ self.values) ** 2).sum()


def heads_of(capture, layer, contexts):
    """The heads of each context, with all keys and values of the context's layer."""
    shape = capture.layers[layer]
    keys, values, queries = (capture.rows(layer, kind).astype("f8") for kind in "kvq")
    for first, length, first_query, n in list(capture.contexts())[:contexts]:
        if length > LEARN + EXACT and length % BLOCK == 0:
            some = queries[:, first_query : first_query + n]
            some = some.reshape(shape.n_kv_heads, -1, n, shape.head_dim[0])
            positions = np.arange(1, n + 1) * capture.query_step - 1
            k, v = keys[:, first : first + length], values[:, first : first + length]
            yield first, k, v, [Head(*each, positions, shape) for each in zip(k, v, some)]


class Found:
    """Errors by (role, idea): [(true bits, bits stored once), errors]."""

    def __init__(self):
        self.errors = {}

    def add(self, role, name, bits, once, error):
        self.errors.setdefault((role, name), ([bits, once], []))[1].append(error)


def judge_head(found, head, role, rows, centre, queries, ideas):
    """Adds all ideas of one head, and returns what `by head` needs: errors at BITS and MOST_BITS on
    the learned tokens, and on later ones. The codecs see rows minus their centres. Keys have the
    mean key, rotated to their positions, as kvant's blocks do."""
    rows = rows - centre
    transform = transform_of(rows, queries)
    scale, table = 16 / rows.shape[1], []
    for bits in (*BITS, MOST_BITS):
        plain = coded(rows, transform, bits) + centre
        errors = head.error(role, plain, head.middle), head.error(role, plain)
        table.append(errors)
        found.add(role, f"trellis-{bits}", bits + scale, 0, errors[1])
        for idea in ideas if bits in BITS else ():
            for name, true, once, made in idea(rows, transform, bits, scale):
                error = head.error(role, made + centre)
                found.add(role, f"trellis-{bits}, {name}", true, once, error)
    return table


# Prediction across layers


def wide(rows):
    return rows.transpose(1, 0, 2).reshape(rows.shape[1], -1)


def inputs_of(inputs):
    made = [wide(x) for x in inputs]
    return np.concatenate([*made, np.ones((len(made[0]), 1))], 1)


def learned_map(inputs, rows):
    """A ridge regression with a constant, from the learned tokens."""
    some = inputs_of(inputs)[KNOWN]
    square = some.T @ some
    square += RIDGE * np.trace(square) / len(square) * np.eye(len(square)) / 100
    return np.linalg.solve(square, some.T @ wide(rows)[KNOWN])


def predicted(weights, inputs, shape):
    """Rows [heads, tokens, dim] of this shape."""
    made = inputs_of(inputs) @ weights
    return made.reshape(shape[1], shape[0], -1).transpose(1, 0, 2)


def constant(rows):
    """The prediction that knows no other layer: the mean of the learned tokens."""
    return np.broadcast_to(rows[:, KNOWN].mean(1, keepdims=True), rows.shape)


def code_rest(rows, guess, heads, role, bits):
    rest = rows - guess
    made = []
    for head, row in zip(heads, rest):
        made.append(coded(row, transform_of(row, head.fit if role == "k" else None), bits))
    return np.stack(made) + guess


def code_predicted(maps, below, heads, keys, values, rope, bits):
    """Decoded keys, and decoded values. maps has a map for each role; roles that it lacks are
    learned and added. Without a layer below keys are not predicted."""
    guess = np.zeros_like(keys)
    if below is not None:
        if "k" not in maps:
            maps["k"] = learned_map([below[0]], rope.turn(keys, -1))
        guess = rope.turn(predicted(maps["k"], [below[0]], keys.shape), 1)
    new_keys = code_rest(keys, guess, heads, "k", bits)
    inputs = [rope.turn(new_keys, -1), *(below[1:] if below is not None else ())]
    if "v" not in maps:
        maps["v"] = learned_map(inputs, values)
    guess = predicted(maps["v"], inputs, values.shape)
    return new_keys, code_rest(values, guess, heads, "v", bits)


def judge_prediction(found, state, maps, heads, keys, values, rope, bits):
    """state: decoded unrotated keys and values of the layer below. maps: of this layer, from
    another context."""
    scale, below, own = 16 / keys.shape[2], state.get(bits), {}
    if below is not None and below[0].shape != keys.shape:
        below = None
    new = code_predicted(own, below, heads, keys, values, rope, bits)
    state[bits] = rope.turn(new[0], -1), new[1]
    if below is None:
        return
    base = rope.turn(constant(rope.turn(keys, -1)), 1), constant(values)
    ways = [("", 0, None), (", predicted", 1, new)]
    if maps.get(bits):
        other = code_predicted(maps[bits], below, heads, keys, values, rope, bits)
        ways.append((", predicted by another text's map", 1, other))
    maps.setdefault(bits, own)
    for n, role, exact in ((0, "k", keys), (1, "v", values)):
        once = (n + 1) * 16 * keys.shape[0] * keys.shape[2] ** 2
        for name, size, made in ways:
            rows = code_rest(exact, base[n], heads, role, bits) if made is None else made[n]
            for end, first in ((FROM_BELOW, EXACT), (LATER, LEARN)):
                for head, row in zip(heads, rows):
                    error = head.error(role, row, None, first)
                    label = f"trellis-{bits}{name}{end}"
                    found.add(role, label, bits + scale, size * once, error)


# Bits by head


def by_head(tables, bits):
    """Errors of all heads when each has its own bits: (uniform, chosen from learned tokens). The
    best gain per bit comes first. A step of a bit costs the same in each head."""
    known, later = (np.array([[row[i] for row in t] for t in tables]) for i in (0, 1))
    level = np.zeros(len(tables), int)
    spare = (bits - 2) * len(tables)
    while spare > 0:
        gain = [
            known[h, level[h]] - known[h, level[h] + 1] if level[h] < 3 else -1
            for h in range(len(tables))
        ]
        level[int(np.argmax(gain))] += 1
        spare -= 1
    chosen = later[np.arange(len(tables)), level]
    return later[:, bits - 2], chosen


def judge(path, rope, layers, contexts, ideas=()):
    """A layer whose layer below is not among the layers is not predicted."""
    inside = [IDEAS[name] for name in ideas if name in IDEAS]
    found, tables, states = Found(), {"k": [], "v": []}, {}
    with Capture(path) as capture:
        for layer in capture.layers if layers is None else layers:
            if layer - 1 not in (layers or capture.layers):
                states.clear()
            maps = {}
            for first, keys, values, heads in heads_of(capture, layer, contexts):
                centres = rope.turn(constant(rope.turn(keys, -1)), 1)
                for head, centre in zip(heads, centres):
                    for role, rows, c, fit in (
                        ("k", head.keys, centre, head.fit),
                        ("v", head.values, 0, None),
                    ):
                        made = judge_head(found, head, role, rows, c, fit, inside)
                        tables[role].append(made)
                for bits in (2, 3) if "predicted" in ideas else ():
                    state = states.setdefault(first, {})
                    judge_prediction(found, state, maps, heads, keys, values, rope, bits)
            print(f"layer {layer}", file=sys.stderr, flush=True)
    return found, tables


def at_bits(found, role, bits, n):
    """Errors of `trellis` at these true bits, for the last n heads: the logarithm is interpolated
    between whole bits."""
    whole = {found.errors[role, f"trellis-{b}"][0][0]: b for b in (*BITS, MOST_BITS)}
    levels = sorted(whole)
    low = max([level for level in levels if level <= bits + 1e-9][-1:], default=levels[0])
    high = levels[min(levels.index(low) + 1, len(levels) - 1)]
    share = (bits - low) / (high - low) if high > low else 0
    a, b = (np.array(found.errors[role, f"trellis-{whole[x]}"][1][-n:]) for x in (low, high))
    return np.maximum(a, 1e-12) ** (1 - share) * np.maximum(b, 1e-12) ** share


def rows_of(model, path, rope, options, about):
    found, tables = judge(path, rope, options.layers, options.contexts, options.ideas.split())
    for (role, name), ((bits, once), errors) in found.errors.items():
        ours = np.maximum(np.array(errors), 1e-12)
        theirs = at_bits(found, role, bits, len(ours))
        for end in (FROM_BELOW, LATER):
            if name.endswith(end):
                theirs = found.errors[role, name[: len("trellis-2")] + end][1]
                theirs = np.array(theirs[-len(ours) :])
        yield model, role, name, bits, once, ours, theirs, about
    for role, table in tables.items() if "by-head" in options.ideas else ():
        for bits in (3, 4):
            uniform, chosen = by_head(table, bits)
            true = found.errors[role, f"trellis-{bits}"][0][0]
            yield model, role, f"trellis-{bits}, by head", true, 0, chosen, uniform, about


def line(model, role, name, bits, once, ours, trellis, about):
    geometric, means = interval(np.maximum(ours, 1e-12), np.maximum(trellis, 1e-12))
    return {
        "model": model,
        "role": role,
        "idea": name,
        "heads": len(ours),
        "bits": f"{bits:.4f}",
        "once": f"{once:.0f}",
        "error": f"{ours.mean():.6g}",
        "error_trellis": f"{trellis.mean():.6g}",
        **{f"geometric{end}": f"{x:.4f}" for end, x in zip(("", "_low", "_high"), geometric)},
        **{f"means{end}": f"{x:.4f}" for end, x in zip(("", "_low", "_high"), means)},
        **about,
    }


def layers_of(text):
    found = []
    for run in text.split(","):
        first, _, last = run.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def main():
    parser = record.options_of(__doc__)
    parser.add_argument("--append", type=pathlib.Path, help="CSV that lines are appended to")
    parser.add_argument("--layers", type=layers_of, help="as in 4-6,14-16 (default: all)")
    parser.add_argument("--ideas", default=" ".join([*IDEAS, "predicted", "by-head"]))
    parser.add_argument("--contexts", type=int, default=2, help="of a capture (default 2)")
    parser.add_argument("models", nargs="+", metavar="NAME=CAPTURE:BASE[,i]")
    given = parser.parse_args()
    for text in given.models:
        model, _, rest = text.partition("=")
        path, _, rope = rest.rpartition(":")
        words = ["ideas.py", f"{model}={pathlib.Path(path).name}:{rope}"]
        words += ["--layers", ",".join(map(str, given.layers))] if given.layers else []
        about = record.context([*words, "--contexts", str(given.contexts)])
        made = [line(*row) for row in rows_of(model, path, Rope(rope), given, about)]
        for row in made:
            print(*list(row.values())[:13], flush=True)
        if given.append:
            record.append(given.append, made)


if __name__ == "__main__":
    main()
