"""The codecs of the table of doors: one or more for each family of the library, with the files that
some of them need. All doors get the same shape of model."""

import functools
import pathlib
import sys
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "integrations" / "python"), str(ROOT / "bench")]

import numpy as np  # noqa: E402
import papers  # noqa: E402

import kvant  # noqa: E402
from kvant.codec import needs_calibration  # noqa: E402

# The shape of tests/integration/tiny_models.py's llama.gguf.
LAYERS, HEADS, KV_HEADS, DIM = 4, 4, 2, 64

PER_HEAD = "hqmq-s96r4, a book per head"
SPECS = (
    "f32",
    "f16",
    "bf16",
    "int-4",
    "int-4:axis=channel,group=64",
    "bdr-4",
    "turboquant-4",
    "turboquant-4:qjl",
    "turboquant-3.5",
    "turboquant-2.5",
    "turboquant-4:transform=file,feedback",
    "trellis-4",
    "trellis-4:transform=first",
    "kivi-2",
    "innerq-base",
    "kmeans-4:c=4",
    "hessian-4",
    "polar-4",
    "polar-3.9",
    "octopus-4",
    "octopus-4:qjl",
    "hqmq-s96r4",
    PER_HEAD,
    "hqmq-s96r4:order=dealt,center=first,norm=first",
    "hqmq-s96r6:med3",
    "hqmq-s96r6:med3,median=page",
    "naive-4",
    "spherical-r4jl4",
    "addvq-k48r4",
)
OF_KEYS = {"turboquant-4:transform=file,feedback": "turboquant-4"}  # and the codec of their values


class Asked(NamedTuple):
    """The codecs that a door is asked for: specs of keys and values, or a settings file."""

    name: str
    k: str | None
    v: str | None
    settings: pathlib.Path | None
    calibration: pathlib.Path | None

    @property
    def words(self):
        """The arguments of kvant.Cache and KvantCache."""
        given = {name: getattr(self, name) for name in ("k", "v", "settings", "calibration")}
        return {name: str(value) for name, value in given.items() if value is not None}


def rows(seed, *shape):
    """Normal numbers with a constant part per channel, as keys have it."""
    random = np.random.default_rng(seed)
    return (random.standard_normal(shape) + random.standard_normal(shape[-1])).astype(np.float32)


def calibrated(path):
    """Writes a calibration with sets of centroids."""
    calibrator = kvant.Calibrator(clusters=(4,), n_threads=1)
    for layer in range(LAYERS):
        for role, seed in (("k", layer), ("v", LAYERS + layer)):
            calibrator.add_rows(layer, role, rows(seed, 256, KV_HEADS, DIM))
        for head in range(KV_HEADS):
            calibrator.add_queries(layer, head, rows(10 * head + layer, 256, DIM))
    calibrator.finish().save(path)
    return path


def per_head(path):
    """Writes settings with a separate book for each layer, role and kv head."""
    places = [(r, i, h) for r in "kv" for i in range(LAYERS) for h in range(KV_HEADS)]
    lines = (
        f"{role} {layer}/{head} {KV_HEADS}x{DIM} hqmq-s96r4:{papers.PAPERS_HQMQ},seed={seed}"
        for seed, (role, layer, head) in enumerate(places)
    )
    return papers.settings_file(path, LAYERS, lines)


def all_asked(folder):
    """One Asked for each of SPECS. The files go to the folder, when the first spec needs them."""
    calibration = functools.cache(lambda: calibrated(pathlib.Path(folder, "tiny.kvcal")))
    for name in SPECS:
        if name == PER_HEAD:
            yield Asked(name, None, None, per_head(pathlib.Path(folder, "heads.kvant")), None)
            continue
        v = OF_KEYS.get(name, name)
        needed = any(needs_calibration(spec, role) for spec, role in ((name, "k"), (v, "v")))
        yield Asked(name, name, v, None, calibration() if needed else None)


def families():
    """The names of the library's families that no spec here belongs to."""
    return {family.name for family in kvant.codecs()} - {x.partition("-")[0] for x in SPECS}
