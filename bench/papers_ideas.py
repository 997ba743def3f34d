#!/usr/bin/env python3
"""A laboratory for ideas that cross papers: keys with learned W and `trellis`, with TurboQuant's
tiers (section 2.3) or SAW-INT4's k-means inside, on captured keys of real models.

    kvant capture -m model.gguf -f judged.txt -n 4096 -c 2048 --queries 8 -o model.safetensors
    kvant calibrate -m model.gguf -f other.txt -n 8192 -c 1024 --clusters 16,256,2048 \\
        --sample 8192 -o model.kvcal
    bench/papers_ideas.py --append bench/results/papers_ideas.csv \\
        SmolLM2=model.safetensors,model.kvcal

A context's first 1024 tokens give the centre, W and the tiers, as a cache learns them from its
prompt. Queries of later tokens judge: the KL divergence of a single head's softmax from the softmax
of exact keys. The first 64 keys stay exact. Centroids come from the calibration, which has to be of
another text; without one there is no k-means. Every head is compared with `trellis` at the idea's
true bits: the logarithm of its KL is interpolated between whole bits. The written interval is of
95 %, by bootstrap over heads.

The laboratory is generous to ideas for which `trellis` has no codec. Tiers of a few channels have
the error of a whole row, and 1, 5 and 6 bits have the error of `turboquant` times RATIO."""

import functools
import itertools
import pathlib
import sys

import numpy as np
import record

from kvant.calibration import Calibration
from kvant.codec import Codec
from kvant.tuning.captures import Capture

LEARN, EXACT = 1024, 64  # tokens that W is learned from; first tokens that stay exact
RATIO = (0.00503 / 0.00918) ** 0.5  # of the errors of trellis-4 and turboquant-4 (papers_findings)
NORM_BITS = 5  # of each further norm, in steps of a quarter of an octave
SCALE_BITS = 16
SAMPLES = 2000  # of the bootstrap
BITS = (3, 4)


# Codecs behind W


@functools.cache
def codec(spec, dim):
    return Codec(spec, dim, "k")


def rounded(rows, bits):
    """Rows after a codec of this many bits per number."""
    exact = bits in (2, 3, 4)
    made = codec(f"{'trellis' if exact else 'turboquant'}-{bits}", rows.shape[1])
    rows = np.ascontiguousarray(rows, np.float32)
    found = made.decode(made.encode(rows), len(rows))
    return found if exact else rows + np.float32(RATIO) * (found - rows)


def tiers_of(dim, bits):
    """{name: (channels, bits) of each tier, the directions with the largest variance first}. The
    bits are `bits` on average."""
    return {
        "two tiers": ((dim // 2, bits + 1), (dim // 2, bits - 1)),
        "three tiers": ((dim // 8, bits + 2), (5 * dim // 8, bits), (dim // 4, bits - 1)),
    }


def in_tiers(rows, plan, learned, norms):
    """Rows whose tiers have different bits. The row has a scale for its largest tier, and each
    other tier is brought to this size. With norms each row stores the ratio of each tier's norm in
    NORM_BITS. Without norms the ratios are constants of the learned rows."""
    ends = np.cumsum([0] + [n for n, _ in plan])
    spans = [slice(a, b) for a, b in zip(ends, ends[1:])]
    main = int(np.argmax([n for n, _ in plan]))

    def sizes(some):
        each = [np.sqrt(np.square(some[:, s], dtype="f8").mean(1)) + 1e-9 for s in spans]
        return np.log2(np.stack(each, 1) / each[main][:, None])

    usual = np.median(sizes(learned), 0)
    ratios = np.broadcast_to(usual, (len(rows), len(plan)))
    if norms:
        most = 2.0 ** (NORM_BITS - 1)
        steps = np.clip(np.round(4 * (sizes(rows) - usual)), -most, most - 1)
        ratios = usual + steps / 4
    factors = np.empty(rows.shape, np.float32)
    for i, span in enumerate(spans):
        factors[:, span] = 2.0 ** ratios[:, i : i + 1]
    scaled = rows / factors
    codes = {bits: rounded(scaled, bits) for _, bits in plan}
    found = np.concatenate([codes[bits][:, s] for s, (_, bits) in zip(spans, plan)], 1)
    return found * factors


# W


def damped(sums, n, strength):
    """A matrix of second moments of n rows, what two channels have in common damped as in
    src/cache/solve.c. Divided by its mean eigenvalue, with 3e-4 on the diagonal."""
    dim = len(sums)
    made = sums * (n / (n + strength * dim))
    np.fill_diagonal(made, np.diag(sums))
    return made * dim / np.trace(made) + 3e-4 * np.eye(dim)


def root(matrix, power=0.5):
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    return (vectors * np.maximum(values, 1e-12 * values.max()) ** power) @ vectors.T


def learned_w(keys, queries, part=None):
    """W of keys about their centre, W^2 = the geometric mean of K^-1 and Q (calibration.md), and K.
    part: the number of channels of each part of W; by default 64 above head_dim 128, as in a cache.
    """
    dim = keys.shape[1]
    k = damped(keys.T @ keys / len(keys), len(keys), 0.25)
    q = damped(queries.T @ queries / len(queries), len(queries), 1)
    part, w = part or (dim if dim <= 128 else 64), np.zeros((dim, dim))
    for at in range(0, dim, part):
        here = np.ix_(range(at, at + part), range(at, at + part))
        half, back = root(k[here]), root(k[here], -0.5)
        w[here] = root(back @ root(half @ q[here] @ half) @ back)
    return w, k


# Ideas: {name: (true bits, keys after the codec)} of one head


def tiered(keys, centre, w, k, end):
    """Tiers of the directions that W K W has, K the keys' second moments."""
    dim, known = keys.shape[1], slice(EXACT, LEARN)
    vectors = np.linalg.eigh(w @ k @ w)[1][:, ::-1]
    turned, back = (keys - centre) @ w @ vectors, vectors.T @ np.linalg.inv(w)
    for bits, norms in itertools.product(BITS, (True, False)):
        for name, plan in tiers_of(dim, bits).items():
            more = norms * NORM_BITS * (len(plan) - 1)
            label = f"trellis-{bits}, {name}, {'a norm each' if norms else 'one norm'}{end}"
            found = in_tiers(turned, plan, turned[known], norms) @ back + centre
            yield label, bits + (SCALE_BITS + more) / dim, found


def variants(keys, queries, centroids):
    """All codecs of a head's keys [tokens, head_dim], with what W learns from: the queries of the
    learned tokens."""
    dim = keys.shape[1]
    known = slice(EXACT, LEARN)
    centre = keys[known].mean(0)
    w, k = learned_w(keys[known] - centre, queries)
    back = np.linalg.inv(w)
    rows = (keys - centre) @ w
    scale = SCALE_BITS / dim
    for bits in (*BITS, BITS[-1] + 1):
        yield f"trellis-{bits}", bits + scale, rounded(rows, bits) @ back + centre
    yield from tiered(keys, centre, w, k, "")
    if dim > 128:
        whole, k = learned_w(keys[known] - centre, queries, dim)
        rows, back = (keys - centre) @ whole, np.linalg.inv(whole)
        for bits in BITS:
            label = f"trellis-{bits}, W in one part"
            yield label, bits + scale, rounded(rows, bits) @ back + centre
        yield from tiered(keys, centre, whole, k, ", W in one part")
    for count, metric in itertools.product(centroids, ("", ", nearest under W")):
        points = centroids[count]
        among, some = (points @ w, keys @ w) if metric else (points, keys)
        nearest = ((among**2).sum(1) - 2 * some @ among.T).argmin(1)
        residuals = keys - points[nearest]
        inner, _ = learned_w(residuals[known], queries)
        for bits in BITS:
            found = rounded(residuals @ inner, bits) @ np.linalg.inv(inner) + points[nearest]
            label = f"trellis-{bits}, k-means of {count}{metric}"
            yield label, bits + scale + np.log2(count) / dim, found


# Judging


def log_softmax(scores):
    scores = scores - scores.max(1, keepdims=True)
    return scores - np.log(np.exp(scores).sum(1, keepdims=True))


def divergence(exact, queries, hidden, keys, shape):
    scores = np.where(hidden, -np.inf, scores_of(queries, keys, shape))
    found = log_softmax(scores)
    with np.errstate(invalid="ignore"):
        terms = np.exp(exact) * (exact - found)
    return np.where(hidden, 0, terms).sum(1).mean()


def scores_of(queries, keys, shape):
    scores = queries @ keys.T * shape.scale
    return shape.softcap * np.tanh(scores / shape.softcap) if shape.softcap else scores


def contexts_of(capture, layer):
    """Keys [heads, tokens, dim], queries [heads, query heads, n, dim] and the queries' positions,
    of each context that is long enough to be judged."""
    shape = capture.layers[layer]
    keys, queries = (capture.rows(layer, kind).astype("f8") for kind in "kq")
    for first, length, first_query, n in capture.contexts():
        if length > LEARN + EXACT:
            some = queries[:, first_query : first_query + n]
            yield (
                keys[:, first : first + length],
                some.reshape(shape.n_kv_heads, -1, n, shape.head_dim[0]),
                np.arange(1, n + 1) * capture.query_step - 1,
            )


def judge(path, calibration):
    """{name: (true bits, KL of each head of each layer and context)}"""
    found, sizes = {}, calibration.info.clusters if calibration else ()
    with Capture(path) as capture:
        for layer, shape in capture.layers.items():
            for keys, queries, positions in contexts_of(capture, layer):
                for head in range(shape.n_kv_heads):
                    points = calibration.entry(layer, head, "k").centroids if sizes else ()
                    points = {n: p.astype("f8") for n, p in zip(sizes, points)}
                    early, late = positions < LEARN, positions >= LEARN
                    fit = queries[head][:, early & (positions >= EXACT)]
                    some = queries[head][:, late].reshape(-1, keys.shape[2])
                    at = np.tile(positions[late], len(queries[head]))[:, None]
                    tokens = np.arange(keys.shape[1])
                    hidden = tokens > at
                    if shape.window:
                        hidden |= tokens <= at - shape.window
                    exact = scores_of(some, keys[head], shape)
                    exact = log_softmax(np.where(hidden, -np.inf, exact))
                    made = variants(keys[head], fit.reshape(-1, keys.shape[2]), points)
                    for name, bits, rows in made:
                        rows[:EXACT] = keys[head][:EXACT]
                        kl = divergence(exact, some, hidden, rows, shape)
                        found.setdefault(name, (bits, []))[1].append(kl)
            print(f"layer {layer}", file=sys.stderr, flush=True)
    return {name: (bits, np.maximum(kl, 1e-12)) for name, (bits, kl) in found.items()}


def interval(ours, theirs):
    """The geometric mean of the ratios and the ratio of the means, each with its interval."""
    rng = np.random.default_rng(0)
    which = rng.integers(0, len(ours), (SAMPLES, len(ours)))
    logs = np.log(ours / theirs)
    geometric, means = np.exp(logs[which].mean(1)), ours[which].mean(1) / theirs[which].mean(1)
    return [
        (value, *np.quantile(some, (0.025, 0.975)))
        for value, some in (
            (np.exp(logs.mean()), geometric),
            (ours.mean() / theirs.mean(), means),
        )
    ]


def rows_of(model, path, calibration, about):
    found = judge(path, calibration)
    with Capture(path) as capture:
        dim = next(iter(capture.layers.values())).head_dim[0]
        contexts = sum(length > LEARN + EXACT for _, length, *_ in capture.contexts())
    plain = {b: found[f"trellis-{b}"] for b in (*BITS, BITS[-1] + 1)}
    for name, (bits, kl) in found.items():
        low = int(name[len("trellis-")])
        share = bits - plain[low][0] if low in BITS else 0
        equal = plain[low][1] ** (1 - share) * plain[min(low + 1, BITS[-1] + 1)][1] ** share
        geometric, means = interval(kl, equal)
        yield {
            "model": model,
            "idea": name,
            "head_dim": dim,
            "heads": len(kl) // contexts,
            "contexts": contexts,
            "bits": bits,
            "kl": kl.mean(),
            "kl_trellis": equal.mean(),
            **dict(zip(("geometric", "geometric_low", "geometric_high"), geometric)),
            **dict(zip(("means", "means_low", "means_high"), means)),
            **about,
        }


def main():
    parser = record.options_of(__doc__)
    parser.add_argument("--append", type=pathlib.Path, help="CSV that rows are appended to")
    parser.add_argument("models", nargs="+", metavar="NAME=CAPTURE[,CALIBRATION]")
    given = parser.parse_args()
    for text in given.models:
        model, _, files = text.partition("=")
        files = [pathlib.Path(file) for file in files.split(",")]
        names = ",".join(file.name for file in files)
        about = record.context(["papers_ideas.py", f"{model}={names}"])
        calibration = Calibration(files[1]) if files[1:] else None
        rows = list(rows_of(model, files[0], calibration, about))
        for row in rows:
            print(
                f"{model:10} {row['idea']:48} {row['bits']:.3f} bits  KL {row['kl']:.3e}  "
                f"of trellis {row['geometric']:.3f} ({row['geometric_low']:.3f} to "
                f"{row['geometric_high']:.3f}), of means {row['means']:.3f} "
                f"({row['means_low']:.3f} to {row['means_high']:.3f})",
                flush=True,
            )
        if given.append:
            record.append(given.append, rows)


if __name__ == "__main__":
    main()
