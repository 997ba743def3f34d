"""Ten numbers of a row, and the levels of trellis-2 that a search finds for them."""

import math
import random

from draw import WIDTH, Canvas, Scale

# format.md, "Trellis codes": 2 bits.
POSITIVE, PER_SIGMA = (2, 14, 27, 39, 47, 66, 85, 127), 58
LEVELS = sorted([-level for level in POSITIVE] + list(POSITIVE))
MEMORY, MASKS = 6, (0o010, 0o101, 0o042)
STEPS = 10
LEFT, RIGHT, TOP, BOTTOM = 44, WIDTH - 20, 104, 400
NOTES = (
    "Each column is a number of a row, the circle its value.",
    "There are 16 levels. The codes before it leave 4 of them",
    "to a number (bold); its own 2 bits choose one. The",
    "encoder searches the path with the least error.",
)


def _subset(window):
    """The subset of levels that a window of trellis bits selects."""
    return sum((bin(window & mask).count("1") & 1) << k for k, mask in enumerate(MASKS))


def _levels(window):
    """The two levels of the subset, in standard deviations."""
    return [LEVELS[8 * i + _subset(window)] / PER_SIGMA for i in (0, 1)]


def _search(values):
    """(error, [(window, level)]) of the best path from any first state, without the row's rest."""
    paths = {state: (0.0, []) for state in range(2**MEMORY)}
    for value in values:
        best = {}
        for state, (error, path) in paths.items():
            for bit in (0, 1):
                window = 2 * state + bit
                level = min(_levels(window), key=lambda x: abs(value - x))
                found = error + (value - level) ** 2
                after = window % 2**MEMORY
                if after not in best or found < best[after][0]:
                    best[after] = (found, [*path, (window, level)])
        paths = best
    return min(paths.values(), key=lambda item: item[0])


def draw(theme, results):
    rng = random.Random(6)
    values = [rng.gauss(0, 1) for _ in range(STEPS)]
    _, path = _search(values)
    canvas = Canvas(theme, 540, "How a trellis picks levels for the numbers of a row")
    canvas.text(16, 30, "A trellis picks levels", size=20, bold=True)
    canvas.text(16, 58, "trellis-2: 2 bits per number", "soft")
    up = Scale((-2.3, 2.3), (BOTTOM, TOP))
    across = Scale((0, STEPS - 1), (LEFT + 14, RIGHT - 14))
    for tick in (-2, -1, 0, 1, 2):
        canvas.text(LEFT - 12, up(tick) + 6, str(tick), "soft", "end")
    for step, (window, _) in enumerate(path):
        open_now = {level for bit in (0, 1) for level in _levels(window & ~1 | bit)}
        for level in (level / PER_SIGMA for level in LEVELS):
            chosen, half = level in open_now, 15 if level in open_now else 9
            ends = [(across(step) - half, up(level)), (across(step) + half, up(level))]
            canvas.path(ends, "ours" if chosen else "grid", 3.5 if chosen else 1.5)
    canvas.path([(across(i), up(level)) for i, (_, level) in enumerate(path)], "ours", 1.5, "3 4")
    for step, value in enumerate(values):
        value = math.copysign(min(abs(value), 2.25), value)
        canvas.dot(across(step), up(value), "stock", 6)
    for number, line in enumerate(NOTES):
        canvas.text(16, BOTTOM + 50 + 24 * number, line, "soft")
    return canvas
