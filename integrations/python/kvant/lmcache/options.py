"""Reads the serde's configuration: {"type": "kvant", "head_dim": 128, ...}."""

from __future__ import annotations

from typing import Any, NamedTuple

from .. import checks

K, V = "turboquant-4:center=first", "turboquant-4"


class Options(NamedTuple):
    head_dim: int  #: of the model's attention
    preset: str | None = None  #: "quality", "balanced", "small" or "tiny"
    k: str | None = None  #: codec specs; without a preset K and V
    v: str | None = None
    calibration: str | None = None  #: path of a .kvcal
    model: str = ""  #: a further name for the model's weights, such as a revision
    workers: int = 0  #: threads; 0: as many as the process may use, at most 8
    device: str = "cpu"  #: or "cuda", "cuda:1"


_TEXTS = ("preset", "k", "v", "calibration", "model", "device")


def read(words: dict[str, Any]) -> Options:
    """The options in a configuration. ValueError or TypeError for wrong ones."""
    unknown = sorted(words.keys() - set(Options._fields))
    if unknown:
        raise ValueError(
            f"kvant serde: {', '.join(unknown)} is none of {', '.join(Options._fields)}"
        )
    if "head_dim" not in words:
        raise ValueError("kvant serde: head_dim is needed: the numbers of a key of one head")
    for name in _TEXTS:
        if words.get(name) is not None:
            checks.text(words[name], f"kvant serde: {name}")
    made = Options(**{name: value for name, value in words.items() if value is not None})
    checks.count(made.head_dim, "kvant serde: head_dim", most=512)
    checks.count(made.workers, "kvant serde: workers", least=0, most=1024)
    if made.preset and (made.k or made.v):
        raise ValueError("kvant serde: give a preset or specs k and v, not both")
    if not made.preset:
        made = made._replace(k=made.k or K, v=made.v or V)
    return made._replace(workers=made.workers or min(8, checks.threads(None)))
