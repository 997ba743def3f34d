"""trellis: section "Trellis codes" of format.md. All rows of a page are searched at the same
time.
"""

import numpy as np

from arithmetic import F32, half, ordered_dot, reciprocal
from layout import SCALAR_PLANES, ceil_div, halves, padded, scalar_codes
from turboquant import root_scale

STATES = 64
INFINITY = 1 << 40
POSITIVE = {
    2: (58, "2 14 27 39 47 66 85 127"),
    3: (44, "2 6 11 15 19 24 29 34 39 45 51 58 67 78 96 124"),
    4: (
        38,
        "0 3 5 7 8 10 13 15 16 18 21 23 25 27 30 32 34 36 39 42 44 47 51 54 58 62 67 72 79 89 102 "
        "125",
    ),
}
WARM_UP = 24


def circle(dim, bits, role):
    """Channels in the order of steps; channels from dim on are padding."""
    tiles = padded(dim) // 16
    if role == "V":
        groups = range(ceil_div(tiles, 4))
        return [
            16 * (4 * g + lane) + 8 * h + r
            for lane in range(4)
            for h in range(2)
            for g in groups
            for r in range(8)
            if 4 * g + lane < tiles
        ]
    p = SCALAR_PLANES[bits][0]
    cw = 4 // p
    order = []
    for q in range(4):
        for f in range(16 // p):
            for u in range(ceil_div(tiles, cw)):
                ct = cw * u + f // 2 % cw
                if ct < tiles:
                    order.append(16 * ct + 8 * (f % 2) + 2 * q + p * f // 8)
    return order


def subset(window):
    w = [window >> j & 1 for j in range(7)]
    return w[3] + 2 * (w[0] ^ w[6]) + 4 * (w[1] ^ w[5])


class Search:
    def __init__(self, cost, padding):
        """cost: rows x steps x subsets; padding: steps without a number."""
        self.cost, self.padding = cost, padding
        self.n_rows, self.n = cost.shape[:2]
        new = np.arange(STATES)
        self.near = new >> 1
        self.subsets = subset(new), subset(new | STATES)

    def run(self, metric, before):
        """Returns the metrics at the end and, for every step from 0 on, whether a state came from
        the upper half.
        """
        choices = np.zeros((self.n, self.n_rows, STATES), bool)
        for k in range(before + self.n):
            step = (k - before) % self.n
            low = metric[:, self.near] + self.cost[:, step][:, self.subsets[0]]
            high = metric[:, self.near + STATES // 2] + self.cost[:, step][:, self.subsets[1]]
            metric = np.minimum(low, high)
            if self.padding[step]:
                metric[:, 1::2] = INFINITY
            metric[metric > INFINITY] = INFINITY
            if k >= before:
                choices[step] = high < low
        return metric, choices

    def trace(self, choices, row, state):
        bits = np.zeros(self.n, int)
        for step in range(self.n - 1, -1, -1):
            bits[step] = state & 1
            state = state >> 1 | int(choices[step, row, state]) * (STATES // 2)
        return state, bits

    def bits(self):
        metric, choices = self.run(np.zeros((self.n_rows, STATES), int), WARM_UP)
        found, open_rows = np.zeros((self.n_rows, self.n), int), []
        ends = metric.argmin(1)
        for row in range(self.n_rows):
            for _ in range(4):
                begin, found[row] = self.trace(choices, row, ends[row])
                if begin == ends[row]:
                    break
                ends[row] = begin
            else:
                open_rows.append(row)
        start = np.full((self.n_rows, STATES), INFINITY)
        start[np.arange(self.n_rows), ends] = 0
        _, choices = self.run(start, 0)
        for row in open_rows:
            found[row] = self.trace(choices, row, ends[row])[1]
        found[:, self.padding] = 0
        return found


def windows(bits):
    return sum(np.roll(bits, j, 1) << j for j in range(7))


def encode(y, bits, role, options):
    dim = y.shape[1]
    deviation, positive = POSITIVE[bits]
    positive = np.array(positive.split(), int)
    levels = np.concatenate([-positive[::-1], positive])
    scale = root_scale(y)
    cells = np.clip(np.rint(y * reciprocal(scale)[:, None] * F32(64)), -256, 255).astype(int)
    order = np.array(circle(dim, bits, role))
    numbers = order < dim
    x = np.zeros((len(y), len(order)), int)
    x[:, numbers] = cells[:, order[numbers]]
    squares = (deviation * x[:, :, None, None] - 64 * levels.reshape(-1, 8)) ** 2
    nearest, error = squares.argmin(2), squares.min(2)
    cost = np.minimum(4095, (error - error.min(2, keepdims=True)) >> (18 - 2 * bits))
    cost[:, ~numbers] = 0
    path = Search(cost, ~numbers).bits()
    z = subset(windows(path))
    i = np.take_along_axis(nearest, z[:, :, None], 2)[:, :, 0]
    code, level = np.zeros((2, len(y), dim), int)
    code[:, order[numbers]] = (2 * i + path)[:, numbers]
    level[:, order[numbers]] = (8 * i + z)[:, numbers]
    values = (levels / deviation).astype(F32)[level]
    if options.get("scale", "unbiased") == "unbiased":
        inner = ordered_dot(y, values)
        scale = np.where(
            inner > 0, half(ordered_dot(y, y) / np.where(inner > 0, inner, F32(1))), F32(0)
        )
    return scalar_codes(code, bits, role), halves(scale), scale[:, None] * values
