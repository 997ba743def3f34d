"""Uses the installed package as a program would: its entry points, a codec and a cache. For
check_wheel.sh, and for ARM64's wheel under qemu (tests/aarch64/delivery.sh)."""

import importlib.metadata

import kvant
import numpy

found = importlib.metadata.entry_points(group="vllm.general_plugins")
plugins = [point for point in found if point.name == "kvant"]
assert plugins, "vLLM does not find its plug-in"
try:
    plugins[0].load()()
except ImportError as error:  # this environment has no vLLM
    assert "vLLM, which loads this plug-in, is not installed" in str(error), error
codec = kvant.Codec("trellis-4", 128)
rows = numpy.random.default_rng(0).standard_normal((100, 128), "float32")
error = rows - codec.decode(codec.encode(rows), 100)
assert (error**2).mean() < 0.011, (error**2).mean()  # codecs.md: 0.0097 of normal rows at 4 bits
cache = kvant.Cache(n_layers=1, n_heads=4, n_kv_heads=2, head_dim=64, max_tokens=128)
sequence = cache.new_sequence()
cache.append(0, sequence, rows.reshape(100, 2, 64), rows.reshape(100, 2, 64))
assert numpy.isfinite(cache.attend(0, sequence, rows[:50].reshape(25, 4, 64))).all()
