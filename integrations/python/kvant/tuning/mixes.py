"""The choices for the kv heads of one layer and role: one candidate for all kv heads, or a mix, in
which kv heads have different candidates.

There are too many mixes to list. This module keeps the mixes that would be best for some budget of
this site alone. It starts with the smallest candidates; each step changes the kv head that saves
most error per byte. The candidates of a mix fit together in one cache."""

from __future__ import annotations

from typing import NamedTuple

from . import allocate


class Mix(NamedTuple):
    bytes: float  # of the whole site
    error: float
    heads: tuple  # the candidate of each kv head, by number


def make(kinds, sizes, errors):
    """A list of Mix; number i has candidate i in all kv heads. Candidates of equal kinds fit
    together in one cache. `sizes`: bytes of one kv head with each candidate; errors[candidate][kv
    head]."""
    n_heads = len(errors[0])
    choices = [_mix((i,) * n_heads, sizes, errors) for i in range(len(kinds))]
    if n_heads > 1:
        for kind in dict.fromkeys(kinds):  # in the order of their first candidates
            choices += _walk([i for i, other in enumerate(kinds) if other == kind], sizes, errors)
    return choices


def _mix(heads, sizes, errors):
    return Mix(
        sum(sizes[i] for i in heads), sum(errors[i][head] for head, i in enumerate(heads)), heads
    )


def _walk(candidates, sizes, errors):
    """The path of candidates that fit together; a kv head is a site of allocate. Mixes with the
    same candidate in all kv heads are left out, because the list has them already."""
    path = allocate.Path(
        [[(sizes[i], errors[i][head]) for i in candidates] for head in range(len(errors[0]))]
    )
    found, more = [], True
    while more:
        heads = tuple(candidates[c] for c in path.chosen)
        if len(set(heads)) > 1:
            found.append(_mix(heads, sizes, errors))
        more = path.step()
    return found
