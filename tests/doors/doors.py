"""The doors that need no PyTorch: each runs a codec, and answers "" or its own words of refusal."""

import os
import subprocess
from unittest import mock

import numpy as np
from asked import DIM, HEADS, KV_HEADS, LAYERS, rows

import kvant

N_TOKENS = 130  # two whole blocks and two tokens
NO_SETTINGS = "it takes specs, not a settings file"


def finite(out):
    """A door that answers with a NaN is broken, whatever the codec."""
    if not np.isfinite(out).all():
        raise AssertionError("an answer that is not finite")


def _attend(device, asked):
    words = dict(max_tokens=512, device=device, n_threads=1)
    with kvant.Cache(LAYERS, HEADS, KV_HEADS, DIM, **words, **asked.words) as cache:
        sequence = cache.new_sequence()
        for layer in range(LAYERS):
            k, v = (rows(seed + layer, N_TOKENS, KV_HEADS, DIM) for seed in (0, 100))
            q = rows(200 + layer, N_TOKENS, HEADS, DIM)
            cache.note_queries(layer, q)
            cache.append(layer, sequence, k, v)
            out = np.empty_like(q)
            cache.attend(layer, sequence, q, out=out)
            finite(out)
    return ""


def library_cpu(asked):
    return _attend("cpu", asked)


def library_gpu(asked):
    """On the mock of a GPU, whose memory is the computer's."""

    def on_host(self, value, what):
        return kvant.places.read_dlpack(value.__dlpack__())

    with mock.patch.object(kvant.places.Gpu, "_describe", on_host):
        return _attend("cuda", asked)


def search(asked):
    """Rows of vectors instead of keys and values."""
    if asked.k is None:
        return NO_SETTINGS
    index = kvant.Index(DIM, spec=asked.k)
    vectors = rows(1, 200, DIM)
    index.add(vectors)
    scores, _ = index.search(vectors[:3], 5)
    finite(scores)
    return ""


STATUS = {4: "no context", 5: "a batch was not decoded, or its logits are not finite"}


def _probe(asked, environment):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("KVANT_", "GGML_"))}
    given = {"k": "K", "v": "V", "settings": "CONFIG", "calibration": "CALIBRATION"}
    clean |= {f"KVANT_{given[name]}": value for name, value in asked.words.items()}
    clean |= {"PROBE_MODEL": os.environ["DOORS_MODEL"], "GGML_NO_BACKTRACE": "1"}
    clean["KVANT_EXACT"] = "0"  # otherwise short contexts stay f16 on a GPU
    command = [os.environ["DOORS_PROBE"], "f16", "on", "99", str(N_TOKENS)]
    done = subprocess.run(
        command, env=clean | environment, capture_output=True, errors="replace", timeout=300
    )
    said = [line[7:] for line in done.stderr.splitlines() if line.startswith("kvant: ")]
    if done.returncode == 0:
        layers = f"{LAYERS} of {LAYERS} layers"  # the plug-in may leave layers to llama.cpp
        return "" if any(layers in line for line in said) else " / ".join(said)
    if done.returncode not in STATUS or not said:
        raise AssertionError(f"the probe ended with {done.returncode}: {done.stderr}")
    return said[-1]


def llama_cpu(asked):
    return _probe(asked, {})


def llama_gpu(asked):
    """llama.cpp with a back end "CUDA" that computes on the CPU."""
    names = {"KVANT_TEST_MOCK": "DOORS_MOCK", "KVANT_CUDA_LIBRARY": "KVANT_CUDA_LIBRARY"}
    driver = os.environ["DOORS_DRIVER"]
    return _probe(asked, {k: os.environ[v] for k, v in names.items()} | {"LD_LIBRARY_PATH": driver})


DOORS = {
    "libkvant, CPU": library_cpu,
    "libkvant, GPU": library_gpu,
    "llama.cpp, CPU": llama_cpu,
    "llama.cpp, GPU": llama_gpu,
    "search": search,
}
