"""How a trellis picks levels: four numbers of a row, the levels that the codes before each allow,
and the levels that the search chooses. 2 bits and 256 states, computed as format.md says."""

import pathlib
import re

from draw import WIDTH, Canvas, Scale

FORMAT = pathlib.Path(__file__).resolve().parents[3] / "docs" / "reference" / "format.md"
MEMORY, TAPS = 8, (0o030, 0o441, 0o202)
# Numbers as a rotation leaves them: normal, with deviation 1. Four in the middle are drawn.
NUMBERS = (
    -1.0, 0.7, 0.4, -0.5, 0.0, 0.2, 0.1, 0.1, 0.7, 1.0, 1.5, -0.1,
    -0.7, 0.7, -0.3, -0.8, 1.7, 0.9, -0.4, -0.3, 0.4, 0.2, 0.5, -0.1,
)  # fmt: skip
DRAWN = range(13, 17)
FIXED = (-1.510, -0.453, 0.453, 1.510)  # the best four levels of a normal number (Lloyd and Max)
LEFT, RIGHT, STEP = 24, WIDTH - 24, 74


def _levels():
    """The 16 levels of trellis-2, from the table in format.md."""
    row = re.search(r"^\| 2 \| (\d+) \| ([\d ]+) \|$", FORMAT.read_text(), re.MULTILINE)
    positive = [int(level) / int(row[1]) for level in row[2].split()]
    return [-level for level in reversed(positive)] + positive


def _subset(window):
    return sum((bin(window & taps).count("1") & 1) << bit for bit, taps in enumerate(TAPS))


def _nearest(levels, number, subset):
    return min((i for i in range(16) if i % 8 == subset), key=lambda i: abs(levels[i] - number))


def _path(levels):
    """(allowed levels, chosen level) of each number, by a Viterbi search from any state."""
    states = range(1 << MEMORY)
    best = {state: (0.0, ()) for state in states}
    for number in NUMBERS:
        found = {}
        for state in states:
            for bit in (0, 1):
                window = state << 1 | bit
                level = _nearest(levels, number, _subset(window))
                cost = best[state][0] + (levels[level] - number) ** 2
                new = window & ((1 << MEMORY) - 1)
                if new not in found or cost < found[new][0]:
                    found[new] = cost, (*best[state][1], (state, level))
        best = found
    _, path = min(best.values())
    for state, level in path:
        subsets = {_subset(state << 1 | bit) for bit in (0, 1)}
        yield [i for i in range(16) if i % 8 in subsets], level


def draw(theme, results):
    levels = _levels()
    canvas = Canvas(theme, 274 + STEP * len(DRAWN), "How a trellis picks levels")
    across = Scale((-2.3, 2.3), (LEFT, RIGHT))
    canvas.text(16, 30, "How a trellis picks levels", size=20, bold=True)
    canvas.text(16, 64, "4 fixed levels, 2 bits per number", "soft")
    _ticks(canvas, across, FIXED, 92, "stock")
    canvas.text(16, 128, "16 levels in 8 subsets, also 2 bits per number", "soft")
    _ticks(canvas, across, levels, 156, "ours")
    for index, level in enumerate(levels):
        anchor = {7: "end", 8: "start"}.get(index, "middle")  # these two are close to 0
        canvas.text(across(level), 184, str(index % 8), "soft", anchor)
    path = list(_path(levels))
    for row, step in enumerate(DRAWN):
        y = 252 + STEP * row
        allowed, chosen = path[step]
        words = f"number {row + 1}: {NUMBERS[step]:g} becomes {levels[chosen]:.2f}"
        canvas.text(16, y - 28, words)
        _ticks(canvas, across, levels, y, "grid")
        _ticks(canvas, across, [levels[i] for i in allowed], y, "ours")
        canvas.dot(across(levels[chosen]), y, "ours", 6)
        canvas.path([(across(NUMBERS[step]), y - 16), (across(NUMBERS[step]), y + 16)], "c", 3)
    bottom = 242 + STEP * len(DRAWN)
    canvas.text(16, bottom - 12, "Blue: the levels that the codes before allow.", "soft")
    canvas.text(16, bottom + 12, "Orange: the number. Disc: the level on the best path.", "soft")
    return canvas


def _ticks(canvas, across, levels, y, color):
    canvas.path([(LEFT, y), (RIGHT, y)])
    for level in levels:
        canvas.path([(across(level), y - 9), (across(level), y + 9)], color, 2)
