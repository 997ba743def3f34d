"""Settings files and presets: which codec stores the keys and values of each layer
(kvant/settings.h)."""

from __future__ import annotations

import ctypes as c
import os
from typing import NamedTuple, Sequence

from . import checks
from . import structs as s
from .calibration import Calibration
from .library import MAX_HEAD_DIM, Owned, c_text, facts, invoke, library


class Preset(NamedTuple):
    """A named pair of codecs, chosen by measurement (results.md)."""

    name: str
    summary: str
    k: str
    v: str
    more_k: str | None = None  #: codec with a bit more for the keys of some layers (settings.md)


def preset(name: str, calibrated: bool = False) -> Preset:
    """The preset "quality", "balanced", "small" or "tiny"; calibrated: its specs for a model with a
    calibration."""
    found = s.Preset.new()
    status = library().kvant_preset_get(
        c_text(checks.text(name, "name"), "name"), bool(calibrated), c.byref(found)
    )
    if status:
        raise ValueError(
            f"preset: there is no preset {name!r}; there are quality, balanced, small and tiny"
        )
    return Preset(**found.plain())


class LayerCodec(NamedTuple):
    """The keys or the values of one layer: one spec for all kv heads, or a tuple of n_kv_heads
    specs."""

    spec: str | tuple[str, ...]
    n_kv_heads: int
    head_dim: int


class SettingsInfo(NamedTuple):
    model: str
    model_fingerprint: int
    n_layers: int
    calibration: str | None  #: path as in the file
    calibration_checksum: int


class Settings(Owned):
    """The codec of each (layer, role, kv head) of one model. Never changes: any number of threads
    may use it.

    `layers`: for each layer a pair of LayerCodec, or of tuples like it: keys, values.
    `calibration`: its path, absolute or relative to the settings file's folder, with the checksum
    of CalibrationInfo; None when no codec needs one. Specs must follow the grammar; check() says
    whether they make codecs. Error with the library's words."""

    def __init__(
        self,
        layers: Sequence[tuple[LayerCodec, LayerCodec]],
        model: str = "",
        model_fingerprint: int = 0,
        calibration: str | os.PathLike[str] | None = None,
        calibration_checksum: int = 0,
    ) -> None:
        super().__init__("kvant_settings_free")
        entries = _entries(layers)
        config = s.SettingsConfig.new(
            model=checks.text(model, "model").encode(),
            model_fingerprint=checks.count(
                model_fingerprint, "model_fingerprint", least=0, most=2**64 - 1
            ),
            n_layers=len(entries) // 2,
            layers=entries,
            calibration=c_text(calibration, "calibration"),
            calibration_checksum=checks.count(
                calibration_checksum, "calibration_checksum", least=0, most=2**64 - 1
            ),
        )
        invoke("settings", "kvant_settings_create", config, self._handle)
        self._read_info()

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Settings:
        """Reads a settings file. Error when it is missing, damaged or changed by hand."""
        settings = cls.__new__(cls)
        Owned.__init__(settings, "kvant_settings_free")
        what, name = f"settings {os.fspath(path)}", c_text(path, "path")
        invoke(what, "kvant_settings_load", name, settings._handle)
        settings._read_info()
        return settings

    def _read_info(self) -> None:
        found = facts("settings info", "kvant_settings_get_info", s.SettingsInfo, self._handle)
        self.info = SettingsInfo(**found)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a settings file; path never holds half of one."""
        what, name = f"settings {os.fspath(path)}", c_text(path, "path")
        invoke(what, "kvant_settings_save", self._handle, name)

    def layer(self, layer: int, role: str) -> LayerCodec:
        """The keys or the values of a layer. Error when there is no such layer."""
        entry, number = s.SettingsLayer(), checks.count(layer, "layer", least=0)
        role_number = checks.role(role)
        if library().kvant_settings_get_layer(self._handle, number, role_number, c.byref(entry)):
            raise IndexError(
                f"layer: {layer} is not below the number of layers, {self.info.n_layers}"
            )
        if entry.spec is not None:
            return LayerCodec(entry.spec.decode(), entry.n_kv_heads, entry.head_dim)
        specs = tuple(entry.heads[head].decode() for head in range(entry.n_kv_heads))
        return LayerCodec(specs, entry.n_kv_heads, entry.head_dim)

    def load_calibration(self, path: str | os.PathLike[str] | None = None) -> Calibration | None:
        """Loads the calibration that the settings were made with, from path or from the path in the
        settings file; None when they need none. Error when the file is another calibration."""
        made = c.c_void_p()
        what, name = "calibration of the settings", c_text(path, "path")
        invoke(what, "kvant_settings_load_calibration", self._handle, name, made)
        return Calibration.owning(made.value) if made.value else None

    def check(self, calibration: Calibration | None = None) -> None:
        """Error, naming layer and role, for the first spec that makes no codec with this
        calibration, or whose kv heads do not fit together."""
        given = checks.handle(calibration, "calibration", "kvant_calibration_free")
        invoke("settings", "kvant_settings_check", self._handle, given)

    def __repr__(self) -> str:
        return f"<kvant.Settings of {self.info.model!r}: {self.info.n_layers} layers>"


def _entries(layers: Sequence[tuple[LayerCodec, LayerCodec]]) -> c.Array[s.SettingsLayer]:
    """An array for C. It keeps the objects that its pointers name alive."""
    roles = [LayerCodec(*role) for layer in layers for role in layer]
    if len(roles) != 2 * len(layers):
        raise ValueError("layers: a pair of keys and values is needed per layer")
    entries = (s.SettingsLayer * len(roles))()
    for entry, role in zip(entries, roles):
        entry.n_kv_heads = checks.count(role.n_kv_heads, "n_kv_heads")
        entry.head_dim = checks.count(role.head_dim, "head_dim", most=MAX_HEAD_DIM)
        if isinstance(role.spec, str):
            entry.spec = c_text(role.spec, "spec")
            continue
        specs = [c_text(checks.text(spec, "spec"), "spec") for spec in role.spec]
        if len(specs) != entry.n_kv_heads:
            raise ValueError(f"spec: {len(specs)} specs are given for {entry.n_kv_heads} kv heads")
        entry.heads = (c.c_char_p * len(specs))(*specs)
    return entries
