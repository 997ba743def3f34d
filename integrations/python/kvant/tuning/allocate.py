"""Picks one choice per site, so that the sum of losses is least within a budget of bytes.

Knows nothing of codecs. A site is a list of choices; a choice is a pair (bytes, loss), finite and
not below 0. The solution is exact on the convex hulls (Lagrange). Then exchanges improve it: in the
end no change of one or two sites that fits the budget gains anything. Deterministic: ties go to the
earlier site and choice."""

from __future__ import annotations

import math

import numpy as np

# Smaller gains, as shares of the loss, are rounding errors. Following them could loop forever.
LEAST_GAIN = 1e-12


def smallest(choices):
    """The choice with the fewest bytes; of several, the one with the least loss."""
    return min(range(len(choices)), key=lambda c: (*choices[c], c))


def total(sites, chosen):
    """Bytes and loss of all sites."""
    picked = [site[c] for site, c in zip(sites, chosen)]
    return sum(size for size, _ in picked), sum(loss for _, loss in picked)


class Path:
    """Starts with every site at its smallest choice. A step changes the site that saves most per
    byte."""

    def __init__(self, sites):
        self._sites = sites
        self.chosen = [smallest(site) for site in sites]
        self._corners = [self._next_corner(site) for site in range(len(sites))]

    def step(self, left=math.inf):
        """Makes a step of at most `left` bytes more. False when there is none."""
        best, at = 0.0, None
        for site, (slope, choice) in enumerate(self._corners):
            if (
                slope > best
                and self._sites[site][choice][0] - self._sites[site][self.chosen[site]][0] <= left
            ):
                best, at = slope, site
        if at is None:
            return False
        self.chosen[at] = self._corners[at][1]
        self._corners[at] = self._next_corner(at)
        return True

    def _next_corner(self, site):
        """The next corner of the site's hull: of all larger choices the one that saves most per
        byte; slope 0 when there is none."""
        choices = self._sites[site]
        size, loss = choices[self.chosen[site]]
        best, at = 0.0, self.chosen[site]
        for c, (larger, less) in enumerate(choices):
            if larger > size and less < loss and (loss - less) / (larger - size) > best:
                best, at = (loss - less) / (larger - size), c
        return best, at


def allocate(sites, budget):
    """The choice of each site, or None when even the smallest choices exceed the budget."""
    path = Path(sites)
    if total(sites, path.chosen)[0] > budget:
        return None
    # A corner that does not fit ends only the path of its site.
    while path.step(budget - total(sites, path.chosen)[0]):
        pass
    exchanges = _Exchanges(sites)
    while exchanges.improve(path.chosen, budget):
        pass
    return path.chosen


class _Exchanges:
    """Changes of one or two sites. Arrays hold all choices of all sites, one site after another."""

    def __init__(self, sites):
        self._sites = sites
        self._site = np.repeat(np.arange(len(sites)), [len(site) for site in sites])
        self._first = np.cumsum([0, *(len(site) for site in sites)])
        self._bytes, self._losses = (
            np.array([choice for site in sites for choice in site], float).reshape(-1, 2).T
        )

    def improve(self, chosen, budget):
        """Makes the best exchange. False when none gains."""
        size, loss = total(self._sites, chosen)
        now = self._first[:-1] + np.array(chosen, int)
        now = now[self._site]  # for every choice, the present choice of its site
        gained, best = LEAST_GAIN * loss, None
        for a in np.flatnonzero(
            self._losses < self._losses[now]
        ):  # one of two moves gains, and it is tried first
            size_a, gain_a = (
                self._bytes[a] - self._bytes[now[a]],
                self._losses[now[a]] - self._losses[a],
            )
            if size_a <= budget - size and gain_a > gained:
                gained, best = gain_a, (a,)
            gains = gain_a + self._losses[now] - self._losses
            fits = (size_a + self._bytes - self._bytes[now] <= budget - size) & (
                self._site != self._site[a]
            )
            b = int(np.argmax(np.where(fits, gains, -math.inf)))
            if fits[b] and gains[b] > gained:
                gained, best = gains[b], (a, b)
        for move in best or ():
            site = int(self._site[move])
            chosen[site] = int(move - self._first[site])
        return best is not None
