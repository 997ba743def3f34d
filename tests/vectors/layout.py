"""The positions of codes in a page, section "Code plane" of format.md."""

import numpy as np

TOKENS = 64
SCALAR_PLANES = {1: [1], 2: [2], 3: [2, 1], 4: [4], 5: [4, 1], 6: [4, 2], 7: [4, 2, 1], 8: [4, 4]}


def ceil_div(a, b):
    return -(-a // b)


def padded(n):
    return 16 * ceil_div(n, 16)


def pad_to(data, multiple):
    return data + bytes(-len(data) % multiple)


def scalar_plane(codes, p):
    """codes: rows x columns of p bits, both multiples of 16."""
    n_rows, n_columns = codes.shape
    row, column = np.meshgrid(np.arange(n_rows), np.arange(n_columns), indexing="ij")
    rt, r, ct, c = row // 16, row % 16, column // 16, column % 16
    cw = 4 // p
    cu = ceil_div(n_columns // 16, cw)
    group = rt // 4
    rows_of_group = np.minimum(4, n_rows // 16 - 4 * group)
    lane = 4 * (r % 8) + c % 8 // 2
    word = 128 * group * cu + (32 * (ct // cw) + lane) * rows_of_group + rt % 4
    bit = p * (4 * (ct % cw) + r // 8 + 2 * (c // 8)) + 16 * (c % 2)
    words = np.zeros(n_rows // 16 * 32 * cu, np.uint32)
    np.bitwise_or.at(words, word, codes.astype(np.uint32) << bit.astype(np.uint32))
    return words.astype("<u4").tobytes()


def scalar_codes(codes, bits, role):
    """codes: tokens x channels."""
    wide = np.zeros((TOKENS, padded(codes.shape[1])), np.int64)
    wide[:, : codes.shape[1]] = codes
    matrix = wide if role == "K" else wide.T
    data, shift = b"", 0
    for p in SCALAR_PLANES[bits]:
        data += scalar_plane(matrix >> shift & ((1 << p) - 1), p)
        shift += p
    return data


def chunk_plane(codes, p, role):
    n_chunks = codes.shape[1]
    t, c = np.meshgrid(np.arange(TOKENS), np.arange(n_chunks), indexing="ij")
    h, rt = t % 16 // 8, t // 16
    if role == "K":
        position = 32 * h + 4 * (t % 8) + rt
        word = 4 * p * (c // 2) + position % (4 * p)
        bit = p * (position // (4 * p)) + 16 * (c % 2)
        n_words = 4 * p * ceil_div(n_chunks, 2)
    else:
        k = 8 * (t % 8 // 2) + 4 * h + rt
        word = n_chunks * (k // (16 // p)) + c
        bit = p * (k % (16 // p)) + 16 * (t % 2)
        n_words = 2 * p * n_chunks
    words = np.zeros(n_words, np.uint32)
    np.bitwise_or.at(words, word, codes.astype(np.uint32) << bit.astype(np.uint32))
    return words.astype("<u4").tobytes()


def chunk_codes(codes, bits, role):
    """codes: tokens x chunks."""
    data, shift = b"", 0
    for p in (16, 8, 4, 2, 1):
        if bits & p:
            data = pad_to(data, 16) + chunk_plane(codes >> shift & ((1 << p) - 1), p, role)
            shift += p
    return data


def halves(*arrays):
    return b"".join(np.ascontiguousarray(a).astype("<f2").tobytes() for a in arrays)
