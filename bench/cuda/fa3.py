"""FlashAttention-3 (libfa3_bench.so, made by fa3.sh) as a baseline of bench_attention.py, in bf16
and e4m3. Keys and values are in shuffled pages of 64 tokens, or in one run per sequence ("plain").
head_dim 128, causal.

Each output is compared with softmax in float32 over the numbers that the call read. Wrong results
are not shown."""

import ctypes
import math
import sys

import torch

PAGE = 64
E4M3_MAX = 448
# In bf16 a probability and an output element are rounded to 8 significant bits; in e4m3 a
# probability is rounded to 4. The errors are independent, so the error's norm stays below these
# parts of the output's norm.
TYPES = {"bf16": (torch.bfloat16, 2**-8 + 2**-8), "fp8": (torch.float8_e4m3fn, 2**-4 + 2**-8)}
# Batch, query heads, kv heads, head_dim, tokens; query tokens. Together they run every kernel of
# the library.
SMALL, MANY = (3, 28, 4, 128, 1024), (64, 32, 8, 128, 256)
CHECKS = [(SMALL, 1), (SMALL, 4), (SMALL, 512), (MANY, 1), (MANY, 4)]

_NUMBERS = "e4m3 batch heads kv_heads tokens queries page_size n_pages".split()
_POINTERS = "q k v out q_descale k_descale v_descale table lengths".split()


class Problem(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in _NUMBERS] + [
        (name, ctypes.c_void_p) for name in _POINTERS
    ]


def load(path):
    library = ctypes.CDLL(path)
    library.fa3_plan_create.restype = ctypes.c_void_p
    library.fa3_plan_create.argtypes = [ctypes.POINTER(Problem), ctypes.POINTER(ctypes.c_int32)]
    library.fa3_plan_run.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.fa3_plan_free.argtypes = [ctypes.c_void_p]
    library.fa3_plan_free.restype = None
    return library


def random_rows(size, dtype):
    """Normal numbers, and their scale in e4m3."""
    x = torch.randn(size, device="cuda", dtype=torch.bfloat16)
    if dtype == torch.bfloat16:
        return x, torch.ones((), device="cuda")
    scale = x.abs().max().float() / E4M3_MAX
    return (x.float() / scale).to(dtype), scale


class Call:
    """One call and all it reads. lengths: of the sequences, of paged calls only."""

    def __init__(self, library, shape, n_queries, dtype, paged, lengths=None):
        batch, heads, kv_heads, dim, tokens = shape
        self.library, self.shape, self.n_queries, self.table = library, shape, n_queries, None
        outer, inner = (batch * tokens // PAGE, PAGE) if paged else (batch, tokens)
        self.k, self.k_scale = random_rows((outer, kv_heads, inner, dim), dtype)
        self.v, self.v_scale = random_rows((outer, kv_heads, inner, dim), dtype)
        self.q, self.q_scale = random_rows((batch, n_queries, heads, dim), dtype)
        self.out = torch.empty(self.q.shape, device="cuda", dtype=torch.bfloat16)
        self.lengths = lengths if lengths and paged else [tokens] * batch
        problem = Problem(dtype != torch.bfloat16, batch, heads, kv_heads, tokens, n_queries)
        for name in ("q", "k", "v"):
            setattr(problem, name, getattr(self, name).data_ptr())
            setattr(problem, name + "_descale", getattr(self, name + "_scale").data_ptr())
        problem.out = self.out.data_ptr()
        if paged:
            self.table = torch.randperm(outer, device="cuda").to(torch.int32).view(batch, -1)
            self.used = torch.tensor(self.lengths, device="cuda", dtype=torch.int32)
            problem.page_size, problem.n_pages = PAGE, outer
            problem.table, problem.lengths = self.table.data_ptr(), self.used.data_ptr()
        splits = ctypes.c_int32()
        torch.cuda.synchronize()
        self.plan = library.fa3_plan_create(problem, splits)
        self.splits = splits.value
        if not self.plan:
            raise RuntimeError("libfa3_bench.so has no kernel for this call, or no memory")

    def __call__(self):
        status = self.library.fa3_plan_run(self.plan, torch.cuda.current_stream().cuda_stream)
        if status:
            raise RuntimeError(f"CUDA error {status}")

    def free(self):
        torch.cuda.synchronize()
        self.library.fa3_plan_free(self.plan)
        del self.k, self.v
        torch.cuda.empty_cache()

    def rows(self, x, scale, sequence, head):
        if self.table is None:
            found = x[sequence, head]
        else:
            bits = x.view(torch.uint8) if x.itemsize == 1 else x  # not every operation knows e4m3
            found = bits[self.table[sequence].long(), head].view(x.dtype).flatten(0, 1)
        return found[: self.lengths[sequence]].float() * scale

    def error(self, sequences, kv_heads):
        """The largest relative error of a sequence and kv head."""
        n = self.n_queries
        group = self.shape[1] // self.shape[2]
        worst = 0.0
        for s in sequences:
            for h in kv_heads:
                k, v = self.rows(self.k, self.k_scale, s, h), self.rows(self.v, self.v_scale, s, h)
                mine = slice(h * group, (h + 1) * group)
                q = self.q[s, :, mine].float() * self.q_scale
                scores = torch.einsum("tgd,kd->tgk", q, k) / q.shape[-1] ** 0.5
                last = len(k) - n + torch.arange(n, device=k.device)
                behind = torch.arange(len(k), device=k.device) > last[:, None]
                want = torch.softmax(scores.masked_fill_(behind[:, None], -torch.inf), -1) @ v
                error = ((self.out[s, :, mine].float() - want).norm() / want.norm()).item()
                worst = max(worst, math.inf if math.isnan(error) else error)
        return worst


def check(library):
    """Names of the types whose every kernel computes attention."""
    good = []
    for name, (dtype, limit) in TYPES.items():
        worst = 0.0
        for shape, n_queries in CHECKS:
            for paged in (True, False):
                lengths = (
                    [shape[4] - 13 * s % 500 for s in range(shape[0])] if shape[4] > 500 else None
                )
                call = Call(library, shape, n_queries, dtype, paged, lengths)
                for _ in range(2):  # the scheduler's state serves twice
                    call.out.fill_(float("nan"))
                    call()
                error = call.error(range(0, shape[0], max(1, shape[0] // 3)), range(shape[2]))
                call.free()
                worst = max(worst, error)
                if error > limit:
                    print(
                        f"  fa3-{name} {shape}, {n_queries} queries, paged {paged}: error {error}",
                        file=sys.stderr,
                    )
        print(
            f"fa3-{name}: largest error of small problems {worst:.5f}, allowed {limit:.5f}",
            flush=True,
        )
        if worst <= limit:
            good.append(name)
    return good


def results(library, names, shape, n_queries, measure):
    """(name, query tokens, microseconds, bytes, relative error) of each type and layout;
    measure(call) returns its time."""
    found = []
    batch, _, kv_heads, head_dim, _ = shape
    for name in names if head_dim == 128 else ():
        dtype, limit = TYPES[name]
        for paged in (True, False):
            title = f"fa3-{name}" + ("" if paged else " plain")
            try:
                call = Call(library, shape, n_queries, dtype, paged)
            except RuntimeError as error:
                print(f"  {title}: {error}", file=sys.stderr)
                continue
            call.out.fill_(float("nan"))
            us = measure(call)
            error = call.error({0, batch - 1}, {0, kv_heads - 1})
            if error <= limit:
                found.append((title, n_queries, us, 2 * call.k.numel() * call.k.itemsize, error))
            else:
                print(f"  {title}: not shown, error {error}", file=sys.stderr)
            call.free()
    return found
