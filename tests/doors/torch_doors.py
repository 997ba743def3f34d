"""The doors that need PyTorch: transformers, LMCache's serde, and the backends of vLLM without its
engine. The doors of vLLM are left out where vLLM is not installed."""

import importlib.util
import pathlib
import sys
import types

from asked import DIM, HEADS, KV_HEADS, LAYERS
from doors import N_TOKENS, NO_SETTINGS, finite

# Asked before tests/python is on the path, because its folder of tests is called vllm, too.
HAS_VLLM = importlib.util.find_spec("vllm")
ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "python" / name) for name in ("pytorch", "vllm")]

import models  # noqa: E402
import torch  # noqa: E402

from kvant.lmcache import options  # noqa: E402
from kvant.lmcache.serde import Serde  # noqa: E402
from kvant.transformers import KvantCache  # noqa: E402


def transformers(asked):
    """A prompt and a token of a tiny model with random weights."""
    shape = dict(num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS)
    model = models.make("llama", head_dim=DIM, **shape)
    cache = KvantCache(model.config, max_tokens=512, n_threads=1, **asked.words)
    ids = torch.randint(3, 300, (1, N_TOKENS + 1), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for part in (ids[:, :-1], ids[:, -1:]):
            finite(model(part, past_key_values=cache, use_cache=True).logits.numpy())
    return ""


def lmcache(asked):
    """An object of 128 tokens, to bytes and back."""
    if asked.k is None:
        return NO_SETTINGS
    words = {"head_dim": DIM, "workers": 1, "k": asked.k, "v": asked.v}
    if asked.calibration:
        words["calibration"] = str(asked.calibration)
    key = types.SimpleNamespace(
        model_name="m", kv_rank=1 << 24, object_group_id=0, cache_salt="", chunk_hash=bytes(32)
    )
    rows = torch.randn(2, LAYERS, 128, KV_HEADS * DIM, generator=torch.Generator().manual_seed(1))
    serde, out = Serde(options.read(words)), torch.full_like(rows, torch.nan)
    data = torch.zeros(serde.size([rows.shape], [rows.dtype]) + 64, dtype=torch.uint8).numpy()
    data = data[-data.ctypes.data % 64 :][: len(data) - 64]
    serde.encode([rows], data, key)
    serde.decode(data, [out], key)
    serde.close()
    finite(out.numpy())
    return ""


def vllm(asked, kind):
    """A batch of one token each, and of a chunk of a prompt, in vLLM's blocks."""
    import steps

    if asked.k is None:
        return NO_SETTINGS
    made = steps.made_impl(f"{asked.k}/{asked.v}", asked.calibration, kind=kind)
    for sequences in (steps.DECODES, steps.CHUNKS):
        step = steps.Step(sequences, torch.float32)
        finite(step.run(made, steps.made_builder().build(0, step.common())))
    return ""


def vllm_cpu(asked):
    import steps

    return vllm(asked, steps.CpuImpl)


def vllm_gpu(asked):
    """On the mock of a GPU."""
    import steps

    return vllm(asked, steps.gpu.Impl)


DOORS = {"transformers, CPU": transformers, "LMCache": lmcache}
if HAS_VLLM:
    DOORS |= {"vLLM, CPU": vllm_cpu, "vLLM, GPU": vllm_gpu}
