"""vLLM with compressed blocks, without a fork: an entry point of the group vllm.general_plugins.

On a GPU, with vLLM 0.33; with older releases; and on a CPU:

    vllm serve MODEL --attention-backend KVANT --kv-cache-dtype kvant_turboquant4 --block-size 64
    KVANT_VLLM=turboquant4 vllm serve MODEL --attention-backend KVANT --block-size 64
    KVANT_VLLM=turboquant4 vllm serve MODEL --block-size 64

KVANT_VLLM names the codecs of blocks: a name of STORED or its codec's (turboquant-4), a preset, or
specs as K/V (int-8/turboquant-4). The dtype `kvant` uses it, too, or `balanced` without it.
Presets, `fast` and specs with transform=file read a calibration: KVANT_VLLM_CALIBRATION, the path
of a .kvcal, or kvant.kvcal next to the model. Without one they learn from the first prompts, and
models with layers of several kinds are refused.
KVANT_VLLM_LEARN=path makes such a file from the first prompts, for the next start, and
KVANT_VLLM_LEARN_POSITIONS=N does it at positions up to N. Without these settings vLLM is
unchanged."""

from __future__ import annotations

import contextlib
import copyreg
import importlib.util
import os
import pathlib
from typing import Any, NamedTuple


class Stored(NamedTuple):
    k: str
    v: str
    calibration: str | None = None  #: a path
    first_k: str | None = None  #: keys of the first layer, if they have another codec
    learns: bool = False  #: transforms come from the first prompts

    def of_layer(self, layer: int) -> Stored:
        """The codecs of one layer of the model."""
        first = self.first_k if layer == 0 and self.first_k else self.k
        return self._replace(k=first, first_k=None)


# Without a calibration, models such as Qwen2.5 fail by the keys of their first layer, which lie far
# from zero (bench/results/vllm_first_layer.csv).
_FIRST = "int-8"
# Codecs that need nothing outside of their pages: engines share, drop and overwrite blocks freely.
# int4 and bdr4 are the codecs of papers, with the same codec in all layers. fast has transforms, as
# presets have them, and no trellis, whose search makes prompts wait.
STORED = {
    "turboquant4": Stored("turboquant-4", "turboquant-4", first_k=_FIRST),
    "fast": Stored("turboquant-6:transform=file,sink=0", "turboquant-4"),
    "int8": Stored("int-8", "int-8"),
    "int4": Stored("int-4", "int-4"),
    "bdr4": Stored("bdr-4", "bdr-4"),
    "trellis4": Stored("trellis-4", "trellis-4", first_k=_FIRST),
    "trellis3": Stored("trellis-3", "trellis-3", first_k=_FIRST),
}
FRAGILE = ("int4", "bdr4")  #: fail on models whose keys have outliers


PRESETS = ("quality", "balanced", "small")
DEFAULT = "balanced"
LEARNS = "tiny"  #: a preset, for whose matrices blocks have no room
DTYPE = "kvant"  #: a cache whose codecs KVANT_VLLM names. kvant_NAME: a name of STORED or PRESETS
BESIDE_MODEL = "kvant.kvcal"


def is_calibrated(spec: str) -> bool:
    """Whether a codec takes numbers from a calibration."""
    return "=file" in spec


def _preset(name: str) -> Stored:
    """A preset without the first tokens in fp16, for which blocks have no room."""
    from ..settings import preset

    found = preset(name, calibrated=True)
    return Stored(*(f"{spec},sink=0" if ":" in spec else spec for spec in (found.k, found.v)))


def _calibration(model: str | None) -> str | None:
    beside = pathlib.Path(model or "", BESIDE_MODEL)
    return os.environ.get("KVANT_VLLM_CALIBRATION") or (
        str(beside) if model and beside.exists() else None
    )


def is_ours(dtype: str | None) -> bool:
    """Whether blocks of a cache dtype of vLLM are kvant's: kvant and kvant_NAME, or any with
    KVANT_VLLM."""
    named = dtype is not None and (dtype == DTYPE or dtype.startswith(f"{DTYPE}_"))
    return (
        named
        or dtype in (None, "auto", "float16", "bfloat16")
        and bool(os.environ.get("KVANT_VLLM"))
    )


def chosen(dtype: str | None = None, model: str | None = None) -> Stored | None:
    """The codecs that the dtype of vLLM's cache names, or KVANT_VLLM. ValueError for an unknown
    name."""
    if not is_ours(dtype):
        return None
    in_dtype = dtype is not None and dtype.startswith(f"{DTYPE}_")
    name = dtype.removeprefix(f"{DTYPE}_") if in_dtype else os.environ.get("KVANT_VLLM") or DEFAULT
    name = next(
        (short for short, stored in STORED.items() if name == stored.k), name
    )  # turboquant-4 is turboquant4
    calibration = _calibration(model)
    if name == LEARNS:
        raise ValueError(
            f"KVANT_VLLM: {name} learns a matrix from each sequence, which vLLM's blocks have no "
            "room for; small needs only a calibration"
        )
    if name not in (*STORED, *PRESETS) and "/" not in name:
        raise ValueError(
            f"KVANT_VLLM: {name!r} is not one of {', '.join((*STORED, *PRESETS))}, nor a pair of "
            "specs K/V"
        )
    found = _preset(name) if name in PRESETS else STORED.get(name) or Stored(*name.split("/", 1))
    if not calibration and any(map(is_calibrated, found[:2])):
        return found._replace(first_k=_FIRST, learns=True)
    return found._replace(calibration=calibration)


def _register_dtypes() -> None:
    """Registers kvant's dtypes with vLLM 0.33 and later, which accept names of dtypes."""
    try:
        from vllm.config.cache import is_known_kv_cache_dtype, register_kv_cache_dtype
    except ImportError:
        return
    import torch
    from vllm.v1.kv_cache_interface import KVQuantMode

    class Handler:
        def torch_dtype(self) -> torch.dtype:
            return torch.uint8

        def quant_mode(self) -> Any:
            return KVQuantMode.CUSTOM

    for name in (DTYPE, *(f"{DTYPE}_{name}" for name in (*STORED, *PRESETS, LEARNS))):
        if not is_known_kv_cache_dtype(name):
            register_kv_cache_dtype(name)(type("Handler", (Handler,), {"name": name}))


def _clear_blocks() -> None:
    """Makes vLLM clear a block before another request gets it, which it does by itself only for
    models with recurrent layers. kvant's blocks always need that. A GPU leaves the slot of a
    refused row, such as one of NaNs, unchanged, and its request must not read another request's row
    there."""
    from vllm.v1 import kv_cache_interface

    config = kv_cache_interface.KVCacheConfig
    given = getattr(kv_cache_interface.KVCacheConfig, "needs_kv_cache_zeroing", None)
    if not isinstance(given, property) or hasattr(given.fget, "kvant"):
        return

    def is_packed(spec: Any) -> bool:
        named = (
            bool(os.environ.get("KVANT_VLLM")) or str(getattr(spec, "dtype", "")) == "torch.uint8"
        )
        return named and getattr(spec, "state_content_bytes", None) is not None

    def needed(self: Any) -> bool:
        specs = (
            spec
            for group in self.kv_cache_groups
            for spec in kv_cache_interface.iter_layer_specs(group.kv_cache_spec)
        )
        return bool(given.fget(self)) or any(map(is_packed, specs))

    needed.kvant = True  # type: ignore[attr-defined]
    config.needs_kv_cache_zeroing = property(needed)  # type: ignore[method-assign]


NAME = "KVANT"  #: of the GPU's backend


def _registered(name: str) -> Any:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    register()
    return AttentionBackendEnum[name]


def _reduce(backend: Any) -> tuple[Any, tuple[Any]]:
    """The function with which pickle makes a backend again. A spawned rank reads its configuration
    before vLLM loads plug-ins there."""
    return (_registered, (NAME,)) if backend.name == NAME else (type(backend), (backend.value,))


def _register_refusal() -> None:
    """Leaves a release of vLLM that was not tested unchanged, except that its users of KVANT see
    why it is refused. Its registry may differ, so any part of this may be missing."""
    with contextlib.suppress(ImportError, AttributeError):
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        if not hasattr(AttentionBackendEnum, NAME):
            AttentionBackendEnum.register(NAME, "kvant.vllm.versions.Backend")
        _register_dtypes()


def register() -> None:
    """vLLM calls this in each of its processes, in some of them more than once. ImportError without
    vLLM. RuntimeError with a release of vLLM that was not tested, but only for users of kvant."""
    if importlib.util.find_spec("vllm") is None:
        raise ImportError(
            "kvant.vllm: vLLM, which loads this plug-in, is not installed (pip install vllm)"
        )
    import vllm

    from . import versions

    refused = versions.refusal(vllm.__version__)
    if refused and os.environ.get("KVANT_VLLM"):
        raise RuntimeError(refused)
    if refused:
        _register_refusal()
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    _register_dtypes()
    _clear_blocks()
    copyreg.pickle(AttentionBackendEnum, _reduce)  # type: ignore[arg-type]
    gpu = "kvant.vllm.gpu.Backend"
    if not hasattr(
        AttentionBackendEnum, "register"
    ):  # before 0.32 backends have no names of their own
        register_backend(AttentionBackendEnum.CUSTOM, gpu)
    elif not hasattr(AttentionBackendEnum, NAME):
        AttentionBackendEnum.register(NAME, gpu)
    if os.environ.get("KVANT_VLLM"):
        chosen()
        register_backend(AttentionBackendEnum.CPU_ATTN, "kvant.vllm.cpu.Backend")
        for name in ("CPU_MLA", "AMX_MLA"):
            if hasattr(AttentionBackendEnum, name):
                register_backend(AttentionBackendEnum[name], "kvant.vllm.refused.Mla")
