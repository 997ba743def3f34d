"""Center and scale of a chunk, for codecs with center=first or norm=first. A chunk is always
decoded as a whole, so the best center is the chunk's mean. Functions take NumPy or PyTorch (m) and
float32 rows [..., 64, kv heads, head_dim]."""

from __future__ import annotations

from typing import Any

from ..arrays import np

SAMPLES, _PARTS = 64, 8
_LEAST = 2.0**-14  # fp16's smallest normal number


def sample(n_tokens: int) -> list[int]:
    """The tokens whose rows are sampled for a chunk."""
    return [i * n_tokens // SAMPLES for i in range(SAMPLES)]


def of(m: Any, rows: Any, with_center: bool, with_scale: bool) -> list[Any]:
    """The center and the scale, as asked for: [..., kv heads, head_dim], rounded to fp16. Rows are
    cut into 8 parts. The part with the largest value is left out, and for means also the part with
    the least, so that a few extreme rows change nothing."""
    shape = rows.shape[:-3] + (_PARTS, SAMPLES // _PARTS) + rows.shape[-2:]
    parts, axis = rows.reshape(shape), len(rows.shape) - 3
    means = m.mean(parts, axis + 1)
    center = (m.sum(means, axis) - m.amax(means, axis) - m.amin(means, axis)) / (_PARTS - 2)
    made = []
    if with_center:
        center = _rounded(m, center)
        made.append(center)
    if with_scale:
        middle = center[..., None, None, :, :] if with_center else 0.0
        far = m.amax(m.abs(parts - middle), axis + 1)
        far = (m.sum(far, axis) - m.amax(far, axis)) / (_PARTS - 1)
        largest = m.amax(far, -1)[..., None]
        made.append(_rounded(m, m.sqrt(m.clip(m.maximum(far, largest / 256), _LEAST, None))))
    return made


def _rounded(m: Any, numbers: Any) -> Any:
    if m is np:
        return numbers.astype(np.float16).astype(np.float32)
    return numbers.half().float()
