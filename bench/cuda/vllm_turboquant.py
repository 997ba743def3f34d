"""vLLM's Triton kernels of turboquant_4bit_nc as a baseline of bench_attention.py. `folder` holds
vLLM's sources, as its wheel unpacks. Only the kernels are imported, because the rest needs further
libraries.

The output is compared with softmax in float32 over the numbers that the stored bytes encode. Wrong
results are not shown."""

import functools
import importlib
import pathlib
import sys
import types

import torch

PAGE = 16  # tokens of vLLM's blocks
# A key is level indices and its norm. A value is codes, a scale and an offset. Numbers are fp16.
BITS = 4
LIMIT = 2**-8  # an output element is rounded to 8 significant bits in bf16; all else is float32


@functools.cache
class Kernels:
    def __init__(self, folder):
        for name in (
            "vllm",
            "vllm.v1",
            "vllm.v1.attention",
            "vllm.v1.attention.ops",
            "vllm.platforms",
            "vllm.triton_utils",
        ):
            module = sys.modules[name] = types.ModuleType(name)
            module.__path__ = [str(pathlib.Path(folder, *name.split(".")))]
        import triton
        import triton.language

        sys.modules["vllm.triton_utils"].triton = triton
        sys.modules["vllm.triton_utils"].tl = triton.language
        platform = types.SimpleNamespace(
            is_rocm=lambda: False,
            is_cuda_alike=lambda: True,
            is_cuda=lambda: True,
            is_xpu=lambda: False,
        )
        sys.modules["vllm.platforms"].current_platform = platform
        ops = "vllm.v1.attention.ops.triton_turboquant_"
        self.store = importlib.import_module(ops + "store").triton_turboquant_store
        self.attend = importlib.import_module(ops + "decode").triton_turboquant_decode_attention


def levels(dim):
    """Levels of Lloyd and Max for a normal distribution of variance 1 / dim, as precise as a sample
    allows."""
    x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(1)).sort().values / dim**0.5
    found = x.view(1 << BITS, -1).mean(1)
    for _ in range(100):
        parts = torch.bucketize(x, (found[1:] + found[:-1]) / 2)
        found = torch.zeros_like(found).index_add_(0, parts, x) / parts.bincount(
            minlength=len(found)
        )
    return found.cuda()


def hadamard(dim):
    h = torch.ones(1, 1)
    while len(h) < dim:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return (h / dim**0.5).cuda()


class Call:
    def __init__(self, kernels, shape):
        batch, heads, kv_heads, dim, tokens = self.shape = shape
        pages = batch * tokens // PAGE
        self.kernels, self.matrix, self.levels = kernels, hadamard(dim), levels(dim)
        self.key_bytes, value_bytes = dim * BITS // 8 + 2, dim * BITS // 8 + 4
        self.cache = torch.empty(
            pages, PAGE, kv_heads, self.key_bytes + value_bytes, device="cuda", dtype=torch.uint8
        )
        self.table = torch.randperm(pages, device="cuda").to(torch.int32).view(batch, -1)
        self.lengths = torch.full((batch,), tokens, device="cuda", dtype=torch.int32)
        self.q = torch.randn(batch, heads, dim, device="cuda", dtype=torch.bfloat16)
        self.out = torch.empty_like(self.q)
        between = (self.levels[1:] + self.levels[:-1]) / 2
        at = torch.arange(tokens, device="cuda")
        for s in range(batch):
            k, v = (
                torch.randn(tokens, kv_heads, dim, device="cuda", dtype=torch.bfloat16)
                for _ in range(2)
            )
            slots = (self.table[s].long()[at // PAGE] * PAGE + at % PAGE).to(torch.int32)
            kernels.store(k, v, self.cache, slots, self.matrix, between, BITS, self.key_bytes, BITS)

    def __call__(self):
        size = self.q.shape[-1]
        self.kernels.attend(
            self.q,
            self.cache,
            self.table,
            self.lengths,
            self.matrix,
            self.levels,
            size**-0.5,
            BITS,
            self.key_bytes,
            BITS,
            norm_correction=True,
            PiT=self.matrix,
            output_buf=self.out,
        )

    def rows(self, sequence, head):
        """Keys, rotated, and values of a sequence."""
        dim, fp16 = self.q.shape[-1], lambda x: x.contiguous().view(torch.float16).float()
        x = self.cache[self.table[sequence].long(), :, head].flatten(0, 1)
        k, v = x[:, : self.key_bytes], x[:, self.key_bytes :]
        codes = [
            torch.stack([part[:, : dim // 2] & 15, part[:, : dim // 2] >> 4], 2).flatten(1).long()
            for part in (k, v)
        ]
        keys = torch.nn.functional.normalize(self.levels[codes[0]], dim=1) * fp16(k[:, dim // 2 :])
        scale, zero = fp16(v[:, dim // 2 :]).split(1, 1)
        return keys, codes[1] * scale + zero

    def error(self, sequence, head):
        group = self.shape[1] // self.shape[2]
        mine = slice(head * group, (head + 1) * group)
        keys, values = self.rows(sequence, head)
        scores = self.q[sequence, mine].float() @ self.matrix @ keys.T / keys.shape[1] ** 0.5
        want = torch.softmax(scores, -1) @ values
        return ((self.out[sequence, mine].float() - want).norm() / want.norm()).item()


def results(folder, shape, measure):
    """(name, query tokens, microseconds, bytes, relative error); measure(call): its time."""
    if shape[3] & (shape[3] - 1):
        return []
    call = Call(Kernels(folder), shape)
    call.out.fill_(float("nan"))
    us = measure(call)
    error = max(call.error(s, h) for s in {0, shape[0] - 1} for h in {0, shape[2] - 1})
    if not error <= LIMIT:
        print(f"  vllm-turboquant_4bit_nc: not shown, error {error}", file=sys.stderr)
        return []
    return [("vllm-turboquant_4bit_nc", 1, us, call.cache.numel(), error)]
