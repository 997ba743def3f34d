"""Choices as settings files. A setting is a list with a choice per site; None means f16."""

from __future__ import annotations

import os

from .. import Settings, needs_calibration

EXACT = "f16"


def specs(location, choice):
    """The codec of each kv head."""
    return [EXACT] * location.n_kv_heads if choice is None else location.specs(choice)


def one_or_all(location, choice):
    """The codec of all kv heads, or a tuple with one for each."""
    heads = specs(location, choice)
    return heads[0] if len(set(heads)) == 1 else tuple(heads)


class Writer:
    """Writes settings of one model. calibration is its path and its CalibrationInfo, or None."""

    def __init__(self, locations, model, fingerprint, calibration):
        self._locations = locations
        self._model = model
        self._fingerprint = fingerprint
        self._calibration = calibration
        self._needs = {}

    def save(self, setting, path):
        layers = [
            (location.n_kv_heads, location.head_dim, one_or_all(location, c))
            for location, c in zip(self._locations, setting)
        ]
        entries = [(spec, n_kv_heads, head_dim) for n_kv_heads, head_dim, spec in layers]
        Settings(
            list(zip(entries[::2], entries[1::2])),
            model=self._model,
            model_fingerprint=self._fingerprint,
            **(self._named_calibration(path) if self._needs_calibration(setting) else {}),
        ).save(path)

    def _needs_calibration(self, setting):
        return any(
            self._takes(location.role, spec)
            for location, c in zip(self._locations, setting)
            for spec in specs(location, c)
        )

    def _takes(self, role, spec):
        if (role, spec) not in self._needs:
            self._needs[role, spec] = needs_calibration(spec, role)
        return self._needs[role, spec]

    def _named_calibration(self, path):
        """Only the name of the calibration if it is in the settings file's folder, so that both can
        be moved together."""
        file, info = self._calibration
        file, folder = os.path.realpath(file), os.path.realpath(os.path.dirname(path) or ".")
        name = os.path.basename(file) if os.path.dirname(file) == folder else file
        return {"calibration": name, "calibration_checksum": info.checksum}
