#!/usr/bin/env python3
"""Decode speed and memory of KvantCache and of transformers' own caches, with random weights and a
context of random rows: CSV on stdout, one line per cache. A line has the median of several rounds;
a round is the time of model.generate for many tokens minus its time for a few tokens.

    bench/bench_transformers.py --device cuda
    bench/bench_transformers.py --layers 4 --shapes 1x2048 --hidden 576 --heads 9 --kv-heads 3 \\
        --head-dim 64                                                                   # on a CPU

cache_bytes: memory of the device for a full cache. decode_bytes: the same while decoding, with
buffers and graphs. Both leave out memory that a process takes only once (kernels): a short context
is decoded first. plain:PRESET is a KvantCache without kvant.transformers.graphs."""

import csv
import gc
import pathlib
import statistics
import sys
import time
import traceback

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "integrations" / "python"))

import model_shape  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from record import options_of  # noqa: E402
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache  # noqa: E402

import kvant  # noqa: E402
from kvant.transformers import KvantCache, graphs  # noqa: E402

COLUMNS = (
    "cache preset layers batch context tokens_per_s ms_per_token cache_bytes decode_bytes first_s"
).split()
FEW = 8  # tokens of the shorter call
PART = 8192  # tokens of random rows that are made at once


def arguments():
    parser = options_of(__doc__)
    model_shape.add_options(parser)
    for name, default in dict(tokens=64, rounds=3).items():
        parser.add_argument("--" + name, type=int, default=default)
    parser.add_argument("--shapes", default="8x32768,1x131072", help="batch x context, with commas")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "float16", "bfloat16"))
    parser.add_argument(
        "--caches",
        default="kvant:balanced,dynamic",
        help="with commas: kvant:PRESET, kvant:SPEC, plain:PRESET, dynamic, static, quanto",
    )
    a = parser.parse_args()
    a.vocabulary = a.vocabulary or 32000
    model_shape.complete(a)
    a.shapes = [tuple(map(int, shape.split("x"))) for shape in a.shapes.split(",")]
    return a


def make_model(a):
    config = model_shape.config(
        a, 2 * max(context for _, context in a.shapes), initializer_range=0.02
    )
    with torch.device(a.device):
        torch.manual_seed(0)
        torch.set_default_dtype(getattr(torch, a.dtype))
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
        torch.set_default_dtype(torch.float32)
    return model


def grown(a):
    """Tokens that a cache has room for."""
    return a.context + FEW + a.rounds * (2 * FEW + a.tokens)


def make_cache(a, model, name):
    kind, _, preset = name.partition(":")
    if kind in ("kvant", "plain"):
        stored = {"k": preset, "v": preset} if "-" in preset else {"preset": preset}
        return KvantCache(model.config, max_tokens=a.batch * grown(a), **stored)
    if kind == "static":
        return StaticCache(config=model.config, max_cache_len=grown(a))
    if kind == "quanto":
        return transformers.QuantizedCache("quanto", model.config, nbits=4)
    return DynamicCache(config=model.config)


def fill(a, cache, name):
    generator = torch.Generator(a.device).manual_seed(1)
    part = a.context if name == "quanto" else PART  # it quantises its first rows alone

    def rows(n):
        shape = a.batch, a.kv_heads, n, a.head_dim
        return torch.randn(
            shape, dtype=getattr(torch, a.dtype), device=a.device, generator=generator
        )

    for layer in range(a.layers):
        for first in range(0, a.context, part):
            cache.update(
                rows(min(part, a.context - first)), rows(min(part, a.context - first)), layer
            )
    if isinstance(cache, KvantCache):
        assert cache.bytes > 0  # the rows are appended


def used(a):
    """Memory of the device: PyTorch's tensors, and memory that other libraries took."""
    if a.device == "cpu":
        return 0
    torch.cuda.synchronize()
    available, total = torch.cuda.mem_get_info()
    return total - available - torch.cuda.memory_reserved() + torch.cuda.memory_allocated()


class Run:
    """A cache that decodes further in every round."""

    def __init__(self, a, model, name):
        self.a, self.model, self.name = a, model, name
        self.ids = torch.ones((a.batch, a.context + 1), dtype=torch.int64, device=a.device)
        before = used(a)
        self.cache = make_cache(a, model, name)
        with torch.inference_mode(False), torch.no_grad():
            fill(a, self.cache, name)
        self.bytes = used(a) - before
        self.seconds = []
        started = time.perf_counter()
        self.take(FEW)  # compiles, captures
        self.first = time.perf_counter() - started
        self.decode_bytes = used(a) - before

    def take(self, n):
        self.model.set_attn_implementation(
            "kvant" if isinstance(self.cache, KvantCache) else "sdpa"
        )
        start = time.perf_counter()
        self.ids = self.model.generate(
            self.ids,
            attention_mask=torch.ones_like(self.ids),
            past_key_values=self.cache,
            max_new_tokens=n,
            min_new_tokens=n,
            do_sample=False,
            pad_token_id=0,
        )
        self.ids[0, -1].item()
        return time.perf_counter() - start

    def round(self):
        few = self.take(FEW)
        self.seconds.append((self.take(FEW + self.a.tokens) - few) / self.a.tokens)

    @classmethod
    def short(cls, a, model, name):
        """Loads kernels."""
        batch, context = a.batch, a.context
        a.batch, a.context = 1, 256
        cls(a, model, name)
        a.batch, a.context = batch, context

    def row(self):
        seconds, (kind, _, preset) = statistics.median(self.seconds), self.name.partition(":")
        speed = f"{self.a.batch / seconds:.2f}", f"{1000 * seconds:.3f}"
        sizes = int(self.bytes), int(self.decode_bytes), f"{self.first:.1f}"
        return [kind, preset, self.a.layers, self.a.batch, self.a.context, *speed, *sizes]


def collect(a):
    if a.device != "cpu":
        gc.collect()
        torch.cuda.empty_cache()


def compare(a, model, rows):
    """One cache at a time has room."""
    for name in a.caches.split(","):
        run = None
        forward = model.forward
        try:
            if name.startswith("kvant"):
                graphs(model)
            if name != "static":  # which compiles
                Run.short(a, model, name)
                collect(a)
            run = Run(a, model, name)
            for _ in range(a.rounds):
                run.round()
            rows.writerow(run.row())
        except Exception as error:  # the remaining caches are still measured
            traceback.print_exc()
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
        model.forward = forward
        del run
        collect(a)
        sys.stdout.flush()


def main():
    a = arguments()
    model = make_model(a)
    print(
        f"PyTorch {torch.__version__}, transformers {transformers.__version__}, kvant "
        f"{kvant.version()}",
        file=sys.stderr,
    )
    rows = csv.writer(sys.stdout)
    rows.writerow(COLUMNS)
    for a.batch, a.context in a.shapes:
        compare(a, model, rows)


if __name__ == "__main__":
    main()
