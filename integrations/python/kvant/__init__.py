"""kvant: the compressed key-value cache, from Python. It takes NumPy arrays on the CPU and arrays
with DLPack on a GPU; kvant.torch and kvant.transformers are modules for these libraries.

Importing kvant loads neither libkvant nor NumPy nor PyTorch. Each name loads these libraries, if it
needs them, when it is first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attend import attention as attention
    from .cache import Cache as Cache, CacheInfo as CacheInfo
    from .calibration import (
        Calibration as Calibration,
        CalibrationEntry as CalibrationEntry,
        CalibrationInfo as CalibrationInfo,
        Calibrator as Calibrator,
        model_fingerprint as model_fingerprint,
    )
    from .codec import (
        Codec as Codec,
        CodecFamily as CodecFamily,
        ExactPart as ExactPart,
        check_spec as check_spec,
        codecs as codecs,
        needs_calibration as needs_calibration,
    )
    from .index import Index as Index, IndexInfo as IndexInfo
    from .library import (
        Error as Error,
        cpu_level as cpu_level,
        set_cpu_level as set_cpu_level,
        version as version,
    )
    from .models import Evaluation as Evaluation, calibrate as calibrate, evaluate as evaluate
    from .paged import PagedCache as PagedCache
    from .rope import Rope as Rope
    from .scheme import Scheme as Scheme
    from .settings import (
        LayerCodec as LayerCodec,
        Preset as Preset,
        Settings as Settings,
        SettingsInfo as SettingsInfo,
        preset as preset,
    )
    from .tensor import Block as Block, Tensor as Tensor, TensorInfo as TensorInfo
    from .tuning.model import tune as tune
    from .vectors import read_vectors as read_vectors

_HOMES = {
    "attend": ("attention",),
    "cache": ("Cache", "CacheInfo"),
    "calibration": (
        "Calibration",
        "CalibrationEntry",
        "CalibrationInfo",
        "Calibrator",
        "model_fingerprint",
    ),
    "codec": ("Codec", "CodecFamily", "ExactPart", "check_spec", "codecs", "needs_calibration"),
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


def _version() -> str:
    """The version of the wheel, or, in a source tree, of libkvant."""
    from importlib import metadata

    try:
        return metadata.version(__name__)
    except metadata.PackageNotFoundError:
        return str(import_module(".library", __name__).version())


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f".{home}", __name__), name)
    except ImportError as error:
        extras = import_module(".extras", __name__)
        if error.name not in extras.EXTRAS:
            raise
        return extras.missing(name, error)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, "__version__"])
