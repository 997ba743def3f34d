"""polar: section "Polar codes" of format.md."""

import functools

import numpy as np

from arithmetic import F32, half, ordered_dot
from layout import chunk_codes, halves, pad_to, scalar_codes
from tables import lloyd_max
from turboquant import root_scale


@functools.lru_cache(None)
def angles(n1, n2, bits):
    """Levels for the density cos^(n1 - 1) sin^(n2 - 1) on [0, pi / 2], in double precision."""
    density = lambda psi: np.cos(psi) ** (n1 - 1) * np.sin(psi) ** (n2 - 1)
    spread = min(np.pi / 4, 2.2 / np.sqrt(n1 + n2))
    middle = np.arctan(np.sqrt(n2 / n1))
    low, high = max(0.02, middle - spread), min(np.pi / 2 - 0.02, middle + spread)
    n = 1 << bits
    return lloyd_max(density, 0, np.pi / 2, low + (high - low) * (np.arange(n) + 0.5) / n)


def sectors(a, b, bits):
    """The code of list 0: the index of one of 2^bits equal sectors of the circle."""
    quadrant = np.select(
        [(a >= 0) & (b >= 0), (a < 0) & (b >= 0), (a <= 0) & (b < 0)], [0, 1, 2], 3
    )
    odd = quadrant % 2 == 1
    x, y = np.where(odd, np.abs(b), np.abs(a)), np.where(odd, np.abs(a), np.abs(b))
    code = quadrant << (bits - 2)
    for k in range(1, 1 << (bits - 2)):
        t = k * np.pi / 2 ** (bits - 1)
        code = code + (y * F32(np.cos(t)) > x * F32(np.sin(t)))
    return code


def turns(a, b, levels):
    code = np.zeros(a.shape, int)
    for t in (levels[1:] + levels[:-1]) / 2:
        code = code + (b * F32(np.cos(t)) > a * F32(np.sin(t)))
    return code


def quantise(y, bits, first_bits=None):
    """Codes of all pairs, list after list, and the numbers that rebuild a list: (levels of each
    pair, its size).
    """
    values, sizes = y, [1] * y.shape[1]
    codes, plan = [], []
    while len(sizes) > 1:
        pairs = len(sizes) // 2
        a, b = values[:, 0 : 2 * pairs : 2], values[:, 1 : 2 * pairs : 2]
        if not plan:
            first_bits = first_bits or bits
            levels = [(np.arange(1 << first_bits) + 0.5) * np.pi / 2 ** (first_bits - 1)] * pairs
            code = sectors(a, b, first_bits)
        else:
            levels = [angles(sizes[2 * i], sizes[2 * i + 1], bits) for i in range(pairs)]
            code = np.stack([turns(a[:, i], b[:, i], levels[i]) for i in range(pairs)], 1)
        codes.append(code)
        plan.append((levels, len(sizes)))
        values = np.concatenate([np.sqrt(a * a + b * b), values[:, 2 * pairs :]], 1)
        sizes = [sizes[2 * i] + sizes[2 * i + 1] for i in range(pairs)] + sizes[2 * pairs :]
    return codes, plan


def rebuild(codes, plan, dim):
    values = np.full((len(codes[0]), 1), F32(np.sqrt(float(dim))), F32)
    for code, (levels, size) in zip(reversed(codes), reversed(plan)):
        below = np.zeros((len(values), size), F32)
        for i, level in enumerate(levels):
            below[:, 2 * i] = values[:, i] * np.cos(level).astype(F32)[code[:, i]]
            below[:, 2 * i + 1] = values[:, i] * np.sin(level).astype(F32)[code[:, i]]
        if size % 2:
            below[:, -1] = values[:, -1]
        values = below
    return values


def encode_blocks(y, role, options):
    """polar-3.9 has 16 channels and 4 lists. The angles of the first list have 4 bits, all others
    2.
    """
    scales, decoded, first, others = [], [], [], []
    for at in range(0, y.shape[1], 16):
        block = np.ascontiguousarray(y[:, at : at + 16])
        codes, plan = quantise(block, 2, 4)
        scale, rows = scaled(block, rebuild(codes, plan, 16), options)
        scales.append(scale)
        decoded.append(rows)
        first.append(codes[0])
        others += codes[1:]
    planes = [
        chunk_codes(np.concatenate(codes, 1), bits, role)
        for codes, bits in ((first, 4), (others, 2))
    ]
    return pad_to(planes[0], 16) + planes[1], halves(np.stack(scales)), np.concatenate(decoded, 1)


def encode(y, bits, role, options):
    if bits == "3.9":
        return encode_blocks(y, role, options)
    bits = int(bits)
    codes, plan = quantise(y, bits)
    scale, decoded = scaled(y, rebuild(codes, plan, y.shape[1]), options)
    padded = np.concatenate(codes + [np.zeros((len(y), 1), int)], 1)
    return scalar_codes(padded, bits, role), halves(scale), decoded


def scaled(y, u, options):
    """Returns the stored bytes and the decoded rows."""
    scale = root_scale(y)
    if options.get("scale", "unbiased") == "unbiased":
        inner = ordered_dot(y, u)
        good = (scale > 0) & (inner > 0)
        scale = np.where(good, half(ordered_dot(y, y) / np.where(good, inner, F32(1))), F32(0))
    return scale, u * scale[:, None]
