"""The choices for the kv heads of one layer and role: one candidate for all kv heads, or a mix, in which each kv head has its
own candidate.

There are too many mixes to list. The kept mixes are those that some budget for this site alone would choose. From the smallest
candidates on, each step changes the kv head that saves most error per byte. The candidates of a mix fit together in one cache."""

from __future__ import annotations

from typing import NamedTuple

from . import allocate


class Mix(NamedTuple):
    bytes: float  # of the whole site
    error: float
    heads: tuple  # the candidate of each kv head, by number


def make(kinds, sizes, errors):
    """A list of Mix; number i has candidate i in all kv heads. Candidates of equal kinds fit together in one cache. sizes: bytes of
    one kv head with each candidate; errors[candidate][kv head]."""
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
    """The path of candidates that fit together; a kv head is a site of allocate. Where all kv heads have the same candidate, the
    list has it already."""
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
