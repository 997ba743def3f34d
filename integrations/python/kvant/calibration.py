"""Calibration files: statistics of a model's keys, values and queries (kvant/calibration.h)."""

from __future__ import annotations

import ctypes as c
import os
from typing import NamedTuple

from . import structs as s
from .library import Owned, c_text, check, library, text_buffer


class CalibrationInfo(NamedTuple):
    """Of the whole file. n_kv_heads, head_dim and n_tokens are the largest of all layers."""

    model: str
    model_fingerprint: int
    n_layers: int
    n_kv_heads: int
    head_dim: int
    n_tokens: int
    seed: int
    clusters: tuple[int, ...]
    bytes: int
    checksum: int


class Calibration(Owned):
    """A calibration file, read at once. Error when the file is missing or damaged. Never changes: any number of
    threads may use it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__("kvant_calibration_free")
        if path is None:
            raise TypeError("path: the path of a calibration is needed, not None")
        text = text_buffer()
        status = library().kvant_calibration_load(c_text(path, "path"), c.byref(self._handle), text, len(text))
        check(f"calibration {os.fspath(path)}", status, text)
        self._read_info()

    @classmethod
    def owning(cls, pointer: int) -> Calibration:
        """Takes over a calibration that a call of the library made."""
        calibration = cls.__new__(cls)
        Owned.__init__(calibration, "kvant_calibration_free")
        calibration._handle.value = pointer
        calibration._read_info()
        return calibration

    def _read_info(self) -> None:
        info = s.CalibrationInfo.new()
        check("calibration info", library().kvant_calibration_get_info(self._handle, c.byref(info)))
        plain = info.plain()
        clusters = tuple(plain["clusters"][: plain.pop("n_codebooks")])
        self.info = CalibrationInfo(**plain | {"clusters": clusters})

    def __repr__(self) -> str:
        return f"<kvant.Calibration of {self.info.model!r}: {self.info.n_layers} layers, {self.info.n_tokens} tokens>"
