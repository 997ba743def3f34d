"""Center and scale of a chunk, for codecs with center=first or norm=first: a chunk is decoded as a whole, so its own mean is the
best there is. Functions take NumPy or PyTorch (m) and rows [..., 64, kv heads, head_dim] of float32."""

from __future__ import annotations

from typing import Any

from ..arrays import np

SAMPLES, _PARTS = 64, 8
_LEAST = 2.0**-14  # fp16's smallest normal number


def sample(n_tokens: int) -> list[int]:
    """Tokens that stand for a chunk."""
    return [i * n_tokens // SAMPLES for i in range(SAMPLES)]


def of(m: Any, rows: Any, with_center: bool, with_scale: bool) -> list[Any]:
    """What is asked for, center first: [..., kv heads, head_dim], rounded to fp16. The largest of 8 parts' figures, and of means the
    least, do not count, so a few rows far from all others move nothing."""
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
