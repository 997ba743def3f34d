"""kmeans, hessian and W: the sections "Centroids", "Query basis" and "Transform" of format.md, and
the file of calibration.md.
"""

import struct

import numpy as np

from arithmetic import F32, SplitMix64, half, ordered_dot, reciprocal
from layout import TOKENS, pad_to
from tables import nearest
from transform import Rotation, largest_power_of_two
import uniform

DIM, HEADS, CLUSTERS = 32, 2, 4
LAYER, HEAD = 0, 1  # the layer and the head of the vectors


class Calibration:
    """One layer of two kv heads. Its numbers are small integers over powers of two, so that every
    sum is exact.
    """

    def __init__(self):
        generator = SplitMix64(7)
        draw = lambda *shape: np.array(
            [(generator.next() >> 33) % 257 - 128 for _ in range(int(np.prod(shape)))], float
        ).reshape(shape)
        self.mean = {role: draw(HEADS, DIM) / 16 for role in "KV"}
        self.centroids = {role: draw(HEADS, CLUSTERS, DIM) / 8 for role in "KV"}
        # A sum of outer products with some strong directions: eigenvalues are far apart, as in a
        # trained model.
        rows = draw(HEADS, 3 * DIM, DIM) * (1 + np.arange(DIM)[::-1] % 8)
        self.moment = np.einsum("hni,hnj->hij", rows, rows) / 65536
        self.diagonal = 2.0 ** (np.arange(HEADS * DIM).reshape(HEADS, DIM) % 5 - 2)
        # Eigenvalues lie between 2 and 6 (rows of the symmetric part sum to less than 2), so W^-1
        # shortens rows.
        part = draw(HEADS, DIM, DIM) / 4096
        part = 4 * np.eye(DIM) + np.tril(part) + np.tril(part, -1).transpose(0, 2, 1)
        self.matrix = part.astype(np.float16).astype(float)

    def entry(self, role):
        arrays = [self.mean[role], self.mean[role] - 64, self.mean[role] + 64]
        if role == "K":
            arrays += [self.moment, self.diagonal]
        data = b"".join(a.astype("<f4").tobytes() for a in arrays)
        if role == "K":
            data += self.matrix[:, *np.tril_indices(DIM)].astype("<f2").tobytes()
        return pad_to(data + self.centroids[role].astype("<f4").tobytes(), 64)

    def file(self, fnv1a):
        name = b"vectors"
        head = struct.pack("<8sIIQQQQQII", b"kvantcal", 2, 2, 0, 0, 0, 1000, 0, len(name), 1)
        head = pad_to(head + struct.pack("<I", CLUSTERS) + name, 64)
        table = b"".join(struct.pack("<IIII16x", LAYER, role, HEADS, DIM) for role in (0, 1))
        data = bytearray(head + pad_to(table, 64) + self.entry("K") + self.entry("V"))
        data[16:24] = struct.pack("<Q", len(data))
        data[24:32] = struct.pack("<Q", fnv1a(data))
        return bytes(data)


CALIBRATION = Calibration()


def query_basis(pool):
    """Rows are eigenvectors by descending eigenvalue, with a positive largest component."""
    moment = CALIBRATION.moment[HEAD] if pool == "head" else CALIBRATION.moment.sum(0)
    _, vectors = np.linalg.eigh(moment.astype(F32).astype(float) if pool == "head" else moment)
    basis = vectors.T[::-1].copy()
    for row in basis:
        if row[np.abs(row).argmax()] < 0:
            row *= -1
    return basis.astype(F32)


def rotation(options, default, seed):
    kind = options.get("rotate", "hadamard" if "block" in options else default)
    block = int(options.get("block", largest_power_of_two(DIM, 128)))
    return Rotation(kind, DIM, seed, block, options.get("signs", "none") == "seed")


def encode_hessian(x, bits, role, options, seed):
    basis, inner = query_basis(options.get("pool", "head")), rotation(options, "hadamard", seed)
    if options.get("order", "hadamard") == "hadamard":
        matrix = inner.undo(basis)
    else:
        matrix = inner.apply(np.ascontiguousarray(basis.T)).T
    y = np.stack([ordered_dot(x, row) for row in matrix], -1)
    code, metadata, decoded = uniform.per_token(y, bits, role, options)
    return code, metadata, decoded.astype(float) @ matrix.astype(float)


def encode_kmeans(x, bits, role, options, seed):
    count = int(options.get("c", 256))
    turn = rotation(options, "none", seed)
    centers = (
        CALIBRATION.mean[role][HEAD][None] if count == 1 else CALIBRATION.centroids[role][HEAD]
    )
    y, centers = turn.apply(x), turn.apply(centers.astype(F32))
    distance = np.zeros((TOKENS, count), F32)
    for j in range(DIM):
        step = y[:, j : j + 1] - centers[None, :, j]
        distance = distance + step * step
    index = distance.argmin(1)
    code, metadata, decoded = uniform.per_token(y - centers[index], bits, role, options)
    scale = np.frombuffer(metadata, "<f2").copy()
    scale[:TOKENS][scale[:TOKENS] == 0] = 2.0**-24
    ids = b"" if count == 1 else index.astype("<u1" if count <= 256 else "<u2").tobytes()
    return code, scale.tobytes() + ids, turn.undo(centers[index] + decoded)


def encode(x, family, bits, role, options, seed):
    return (encode_kmeans if family == "kmeans" else encode_hessian)(
        x, int(bits), role, options, seed
    )


def power(matrix, exponent):
    values, vectors = np.linalg.eigh(matrix)
    return vectors * values**exponent @ vectors.T


def queries():
    """The queries' second moment, of trace DIM, and its floor."""
    moment = CALIBRATION.moment[HEAD].astype(F32).astype(float)
    return moment * DIM / np.trace(moment) + 3e-4 * np.eye(DIM)


def steering_matrix():
    """S of section "Feedback", which replaces W."""
    w = CALIBRATION.matrix[HEAD]
    m = np.linalg.inv(w) @ queries() @ np.linalg.inv(w)
    s = power(w @ power(m, -0.5) @ w, 0.5) * np.sqrt(np.trace(m) / np.trace(power(m, 0.5)))
    return s + 2.0**-10 * np.linalg.norm(s) * np.eye(DIM)


class Feedback:
    """Rounds numbers one after another, section "Feedback"."""

    def __init__(self, turn):
        back = turn.apply(np.linalg.inv(steering_matrix()).astype(F32)).astype(
            float
        )  # columns of R S^-1
        loss = back.T @ queries() @ back
        loss += 1e-2 * np.trace(loss) / DIM * np.eye(DIM)
        factor = np.linalg.cholesky(loss[::-1, ::-1]).T[::-1, ::-1]  # lower, factor^T factor = loss
        pivots = np.diag(factor)
        self.lower = (factor / pivots[:, None]).astype(F32)
        self.pivots = (pivots**2 * DIM / np.trace(loss)).astype(F32)

    def codes(self, y, codebook, scale, unbiased):
        """Returns codes, and the scale to store."""
        z = y * reciprocal(scale)[:, None]
        target, a, code = z.copy(), z.copy(), np.zeros(y.shape, int)
        own, product = np.zeros(len(y), F32), np.zeros(len(y), F32)
        for j in range(DIM):
            code[:, j] = nearest(target[:, j], codebook)
            value = codebook[code[:, j]]
            own = own + self.pivots[j] * a[:, j] * a[:, j]
            product = product + self.pivots[j] * a[:, j] * (a[:, j] + (value - target[:, j]))
            after = self.lower[j + 1 :, j]
            target[:, j + 1 :] -= after * (value - z[:, j])[:, None]
            a[:, j + 1 :] += after * z[:, j : j + 1]
        if unbiased:
            ratio = np.where(product > 0, own / np.where(product > 0, product, F32(1)), F32(1))
            scale = half(scale * np.clip(ratio, F32(0.5), F32(2)))
        return code, scale


class Weighting:
    """R W on rows, and the inverse, section "Transform"; values have no W."""

    def __init__(self, kind, role, turn, feedback=False):
        self.kind, self.turn = kind if role == "K" else "none", turn
        self.factors = CALIBRATION.diagonal[HEAD].astype(F32)
        matrix = steering_matrix() if feedback else CALIBRATION.matrix[HEAD]
        self.rows = turn.apply(matrix.astype(F32))
        self.back = turn.undo(np.eye(DIM)) @ np.linalg.inv(matrix)

    def apply(self, x):
        if self.kind == "none":
            return self.turn.apply(x)
        if self.kind == "diagonal":
            return self.turn.apply(x * self.factors)
        y = np.zeros_like(x)
        for j in range(DIM):
            y = y + x[:, j : j + 1] * self.rows[j]
        return y

    def undo(self, y):
        if self.kind == "file":
            return y.astype(float) @ self.back
        x = self.turn.undo(y)
        return x / self.factors if self.kind == "diagonal" else x
