"""kvant: the compressed key-value cache, from Python. NumPy on the CPU, pointers of PyTorch and
others on a GPU; kvant.torch and kvant.transformers are modules for these libraries.

Importing kvant loads neither libkvant nor NumPy nor PyTorch: each name loads what it needs when it
is first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attend import attention
    from .cache import Cache, CacheInfo
    from .calibration import Calibration, CalibrationEntry, CalibrationInfo, Calibrator, model_fingerprint
    from .codec import Codec, CodecFamily, check_spec, codecs, needs_calibration
    from .index import Index, IndexInfo
    from .library import Error, cpu_level, set_cpu_level, version
    from .models import Evaluation, calibrate, evaluate
    from .paged import PagedCache
    from .rope import Rope
    from .scheme import Scheme
    from .settings import LayerCodec, Preset, Settings, SettingsInfo, preset
    from .tensor import Block, Tensor, TensorInfo
    from .tuning.model import tune
    from .vectors import read_vectors

_HOMES = {
    "attend": ("attention",),
    "cache": ("Cache", "CacheInfo"),
    "calibration": ("Calibration", "CalibrationEntry", "CalibrationInfo", "Calibrator", "model_fingerprint"),
    "codec": ("Codec", "CodecFamily", "check_spec", "codecs", "needs_calibration"),
    "index": ("Index", "IndexInfo"),
    "library": ("Error", "cpu_level", "set_cpu_level", "version"),
    "models": ("Evaluation", "calibrate", "evaluate"),
    "paged": ("PagedCache",),
    "rope": ("Rope",),
    "scheme": ("Scheme",),
    "settings": ("LayerCodec", "Preset", "Settings", "SettingsInfo", "preset"),
    "tensor": ("Block", "Tensor", "TensorInfo"),
    "tuning.model": ("tune",),
    "vectors": ("read_vectors",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{home}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
