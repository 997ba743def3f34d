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


def total(locations, chosen):
    """Bytes and loss of all sites."""
    picked = [location[c] for location, c in zip(locations, chosen)]
    return sum(size for size, _ in picked), sum(loss for _, loss in picked)


class Path:
    """Starts with every site at its smallest choice. A step changes the site that saves most per
    byte."""

    def __init__(self, locations):
        self._locations = locations
        self.chosen = [smallest(location) for location in locations]
        self._corners = [self._next_corner(location) for location in range(len(locations))]

    def step(self, left=math.inf):
        """Makes a step of at most `left` bytes more. False when there is none."""
        best, at = 0.0, None
        for location, (slope, choice) in enumerate(self._corners):
            if (
                slope > best
                and self._locations[location][choice][0]
                - self._locations[location][self.chosen[location]][0]
                <= left
            ):
                best, at = slope, location
        if at is None:
            return False
        self.chosen[at] = self._corners[at][1]
        self._corners[at] = self._next_corner(at)
        return True

    def _next_corner(self, location):
        """The next corner of the site's hull: of all larger choices the one that saves most per
        byte; slope 0 when there is none."""
        choices = self._locations[location]
        size, loss = choices[self.chosen[location]]
        best, at = 0.0, self.chosen[location]
        for c, (larger, less) in enumerate(choices):
            if larger > size and less < loss and (loss - less) / (larger - size) > best:
                best, at = (loss - less) / (larger - size), c
        return best, at


def allocate(locations, budget):
    """The choice of each site, or None when even the smallest choices exceed the budget."""
    path = Path(locations)
    if total(locations, path.chosen)[0] > budget:
        return None
    # A corner that does not fit ends only the path of its site.
    while path.step(budget - total(locations, path.chosen)[0]):
        pass
    exchanges = _Exchanges(locations)
    while exchanges.improve(path.chosen, budget):
        pass
    return path.chosen


class _Exchanges:
    """Changes of one or two sites. Arrays hold all choices of all sites, one site after another."""

    def __init__(self, locations):
        self._locations = locations
        self._site = np.repeat(np.arange(len(locations)), [len(location) for location in locations])
        self._first = np.cumsum([0, *(len(location) for location in locations)])
        self._bytes, self._losses = (
            np.array([choice for location in locations for choice in location], float)
            .reshape(-1, 2)
            .T
        )

    def improve(self, chosen, budget):
        """Makes the best exchange. False when none gains."""
        size, loss = total(self._locations, chosen)
        now = self._first[:-1] + np.array(chosen, int)
        now = now[self._site]  # for every choice, the present choice of its site
        gained, best = LEAST_GAIN * loss, None
        for a in np.flatnonzero(
            self._losses < self._losses[now]
        ):  # one of two moves gains, and it is tried first
            size_a = self._bytes[a] - self._bytes[now[a]]
            gain_a = self._losses[now[a]] - self._losses[a]
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
            location = int(self._site[move])
            chosen[location] = int(move - self._first[location])
        return best is not None
