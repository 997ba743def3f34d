"""Encodes random rows with a codec of the package and compares. Owns how rows are drawn and which
quantities are measured.

A probe is one codec in one setup; each of its series has one number per seed. Cells that need the
same measurement share a probe. Inner products are computed as in attention, from the bytes of pages
and not from decoded rows. Everything that is compared is computed in double precision."""

import math

import numpy as np

from ..codec import Codec
from ..library import Error
from . import distortion_covering

HEAD_DIM = 128


class Normal:
    """Normal numbers, the same for every codec of a setup and seed. NumPy promises that the stream
    of RandomState never changes."""

    def __init__(self, setup, seed):
        self._random = np.random.RandomState([list(SETUPS).index(setup), seed])

    def rows(self, n, width=HEAD_DIM):
        return self._random.standard_normal((n, width)).astype(np.float32)


class Probe:
    """The measurements of a spec: series[name] has a number per seed. problem says why there is no
    measurement: the codec is missing, or refused its rows. Sizes may be of a pair, "keys / values".
    """

    def __init__(self, spec, setup, quick):
        self.spec, self.setup = spec, setup
        self._measure, *draws = SETUPS[setup]
        self.keys, self.queries, self.seeds = draws[quick]
        self.head_dim = 64 if setup == "info64" else HEAD_DIM
        self.series, self.problem, self.done = {}, None, False

    @property
    def work(self):
        """Rows that will be encoded: the unit of progress."""
        return self.keys * self.seeds

    def run(self, keep_going, measured):
        """Measures seed by seed while keep_going() is true; calls measured(rows) after each."""
        of_seeds = []
        try:
            for seed in range(self.seeds):
                if not keep_going():
                    return
                codec = Codec(self.spec.partition(" / ")[0], self.head_dim, "k", seed=seed)
                of_seeds.append(self._measure(codec, Normal(self.setup, seed), self))
                measured(self.keys)
        except Error as error:
            self.problem = error.reason
            return
        self.series = {name: np.array([one[name] for one in of_seeds]) for name in of_seeds[0]}
        self.done = True


def dot(a, b):
    """Inner products, row by row."""
    return np.einsum("ij,ij->i", a, b)


def fidelity(codec, normal, probe):
    queries, keys = normal.rows(probe.queries), normal.rows(probe.keys)
    pages = codec.encode(keys)
    scores, decoded = codec.scores(queries, pages), codec.decode(pages, len(keys))
    keys, decoded, queries = (x.astype(np.float64) for x in (keys, decoded, queries))
    squared = dot(keys - decoded, keys - decoded)
    inner, lengths = dot(keys, decoded), dot(keys, keys)
    missed = queries @ keys.T - scores
    return {
        "cos": np.mean(inner / np.sqrt(lengths * dot(decoded, decoded))),
        "mse": np.mean(squared) / HEAD_DIM,
        "relative": np.mean(squared / lengths),
        "tail95": np.percentile(squared, 95) / HEAD_DIM,
        "slope": np.mean(inner / lengths),  # the factor by which inner products shrink
        "ip_abs": np.mean(np.abs(missed)),
        "ip_square": HEAD_DIM * np.mean(missed**2 / np.outer(dot(queries, queries), lengths)),
        "true_bits": codec.true_bits,
    }


def needle(codec, normal, probe):
    """The softmax weight of one key.

    Its length is the average length of keys, sqrt(head_dim). If this length were drawn like the
    lengths of all further keys, the weight without a codec would average to 0.92. The paper reports
    0.960. Softmax is steep, and the score grows with the square of the length."""
    row = normal.rows(1)
    row *= math.sqrt(HEAD_DIM) / np.linalg.norm(row)
    query = row + np.float32(0.1) * normal.rows(1)
    its_score = codec.scores(query, codec.encode(row))[0, 0].astype(np.float64)
    scores = codec.scores(query, codec.encode(normal.rows(probe.keys)))
    return {"needle": 1 / (1 + np.sum(np.exp((scores - its_score) / math.sqrt(HEAD_DIM))))}


def codebook(codec, normal, probe):
    """Rows of length sqrt(head_dim) have the scale 1 in 16 bits too: decoded, they hold the levels
    themselves."""
    rows = normal.rows(probe.keys)
    lengths = np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
    rows = (rows * (math.sqrt(HEAD_DIM) / lengths)).astype(np.float32)
    levels, counts = np.unique(codec.decode(codec.encode(rows), len(rows)), return_counts=True)
    shares = counts / counts.sum()
    return {
        "level_low": levels[levels > 0][0],
        "level_high": levels[-1],
        "entropy": -np.sum(shares * np.log2(shares)),
    }


def covering(codec, normal, probe):
    return distortion_covering.measure(codec, normal.rows(probe.keys, 4))


def sizes(codec, _normal, probe):
    """The sizes of keys and of values, which may differ: a paper's figure is their mean."""
    values = Codec(probe.spec.rpartition(" / ")[2], probe.head_dim, "v")
    return {
        name: (getattr(codec, name) + getattr(values, name)) / 2
        for name in ("nominal_bits", "true_bits")
    }


# For each setup: the measure; keys, queries and seeds as in the papers; the same for a quick run.
# A quick run draws less, but keeps enough seeds for a standard error to mean something.
SETUPS = {
    "info": (sizes, (0, 0, 1), (0, 0, 1)),  # nothing is drawn
    "fidelity": (fidelity, (1024, 16, 64), (512, 16, 16)),  # OCTOPUS Table 1, TurboQuant's theorems
    "split": (fidelity, (8192, 16, 4), (128, 16, 8)),  # OCTOPUS Table 4
    "rounding": (fidelity, (4096, 64, 5), (128, 64, 8)),  # OCTOPUS Table 5
    "needle": (needle, (2048, 1, 128), (2048, 1, 16)),  # OCTOPUS section 4.1
    "codebook": (codebook, (1024, 0, 8), (256, 0, 8)),  # levels, off rows of known scale
    "covering": (covering, (65536, 0, 16), (8192, 0, 8)),  # directions of quaternions
    "info64": (sizes, (0, 0, 1), (0, 0, 1)),  # at head_dim 64
}
