#!/usr/bin/env python3
"""TurboQuant's Figures 1 and 2 on real embeddings: the bias and the variance of inner products, and
the squared error, by bits.

    $(scripts/fetch.py torch) bench/search/data.py --text wiki.test.raw minilm
    bench/papers_embeddings.py --append bench/results/papers_embeddings.csv minilm gauss

bench/search/data.py makes the sets, except for `gauss`. That has as many random directions of as
many channels as minilm, in which no codec can find structure. The paper has 100,000 of DBpedia's
embeddings by OpenAI. Rows and queries have length 1. A rotation is drawn for each seed.

mse       mean |x - x'|^2
error     mean square of <y, x'> - <y, x>, times the dimension (as in the paper's theorem 2)
variance  of the same, times the dimension
slope     of the error by <y, x>: -0.1 means that large products come out a tenth too small
bias      mean error of the products in the largest thousandth, in units of their mean
The files' figures are means over seeds; _se is the standard error between seeds."""

import pathlib
import sys

import numpy as np
import record

from kvant.codec import Codec

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "search"))

import data  # noqa: E402

SEEDS, BITS, BATCH = 4, (1, 2, 3, 4, 5), 50
SPECS = {
    "mse": "turboquant-{}:scale=norm",
    "prod": "turboquant-{}:qjl,sketch=gaussian",
    "kvant's scale": "turboquant-{}:scale=unbiased",
}
FIGURES = ("mse", "variance", "slope", "bias", "error")


def sets_of(name, most):
    """Rows and queries of a set, the first `most` rows."""
    if name != "gauss":
        return data.load(name, "base")[:most], data.load(name, "query")
    base, queries = sets_of("minilm", most)
    rng = np.random.default_rng(data.SEED)
    return tuple(data.gaussian(rng, *rows.shape) for rows in (base, queries))


def measure(spec, rows, queries, seed):
    """The figures, in the order of FIGURES, and the codec's true bits."""
    dim = rows.shape[1]
    made = Codec(spec, dim, "k", seed=seed)
    lost = made.decode(made.encode(rows), len(rows)) - rows
    n = total = squares = by_product = products = bias = mean = 0.0
    largest = None
    for first in range(0, len(queries), BATCH):
        some = queries[first : first + BATCH]
        exact, wrong = some @ rows.T, some @ lost.T
        n += wrong.size
        total += wrong.sum(dtype="f8")
        squares += np.square(wrong, dtype="f8").sum()
        by_product += np.multiply(wrong, exact, dtype="f8").sum()
        products += np.square(exact, dtype="f8").sum()
        largest = np.quantile(exact, 0.999) if largest is None else largest
        top = exact >= largest
        bias += wrong[top].sum(dtype="f8")
        mean += exact[top].sum(dtype="f8")
    variance = dim * (squares / n - (total / n) ** 2)
    mse = np.square(lost, dtype="f8").sum() / len(rows)
    return (mse, variance, by_product / products, bias / mean, dim * squares / n), made.true_bits


def rows_of(name, most, about):
    rows, queries = sets_of(name, most)
    dim = rows.shape[1]
    for bits in BITS:
        for form, spec in SPECS.items():
            spec = spec.format(bits)
            found = [measure(spec, rows, queries, seed) for seed in range(SEEDS)]
            figures = np.array([x for x, _ in found])
            line = dict(zip(FIGURES, figures.mean(0)))
            errors = figures.std(0, ddof=1) / SEEDS**0.5
            line |= {f"{key}_se": error for key, error in zip(FIGURES, errors)}
            shrink = 4.0**-bits
            yield {
                "data": name,
                "n": len(rows),
                "dim": dim,
                "queries": len(queries),
                "seeds": SEEDS,
                "bits": bits,
                "true_bits": found[0][1],
                "form": form,
                "spec": spec,
                **line,
                "mse_lower": shrink,
                "mse_upper": 3**0.5 * np.pi / 2 * shrink,
                "error_lower": shrink,
                "error_upper": 3**0.5 * np.pi**2 * shrink,
                **about,
            }


def main():
    parser = record.options_of(__doc__)
    parser.add_argument("--append", type=pathlib.Path, help="CSV that rows are appended to")
    parser.add_argument("--rows", type=int, default=10**9, help="the first so many of a set")
    parser.add_argument("names", nargs="+", metavar="NAME", help=f"{', '.join(data.NAMES)}, gauss")
    given = parser.parse_args()
    about = record.context(["papers_embeddings.py", f"--rows={given.rows}", *given.names])
    for name in given.names:
        for row in rows_of(name, given.rows, about):
            print(
                f"{name:8} {row['spec']:36} {row['bits']}  mse {row['mse']:.5f}  "
                f"d x error {row['error']:.5f}  slope {row['slope']:+.5f}  "
                f"bias {row['bias']:+.5f}",
                flush=True,
            )
            if given.append:
                record.append(given.append, [row])


if __name__ == "__main__":
    main()
