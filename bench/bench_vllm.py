#!/usr/bin/env python3
"""vLLM with kvant's blocks and with its own caches, with random weights: CSV on stdout and in a
file, one line per cache and shape. vLLM and kvant must be importable, kvant as a plug-in (its
wheel). `ids` compares tokens of an exact codec with tokens of vLLM's own cache.

    bench/bench_vllm.py speed --csv vllm.csv                  # Llama 3.1 8B's shape on a GPU
    bench/bench_vllm.py speed --csv vllm.csv --caches auto turboquant4 int4 --shapes 4x1024 \\
        --layers 8 --hidden 576 --heads 9 --kv-heads 3 --head-dim 64 --feed-forward 1536 \\
        --vocabulary 49152                                    # on a CPU
    bench/bench_vllm.py ids

Caches: a dtype of vLLM's cache, or a name of KVANT_VLLM; CACHE@BACKEND and CACHE@@DTYPE choose a
backend and the model's dtype. tpot_ms: wall time per step of all requests, from two calls with few
and many tokens. Their contexts are not computed: vLLM's DecodeBenchConnector fills blocks with
constants. The column ttft_ms is the time until all prompts of a batch, which are computed, have one
token. The column tokens_that_fit is the blocks that vLLM counts x tokens per block, without
--gib."""

import argparse
import csv
import itertools
import json
import os
import pathlib
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent import futures

import model_shape

COLUMNS = (
    "device vllm commit command model cache layers batch context tpot_ms tokens_per_s "
    "tokens_that_fit ttft_ms"
).split()
OF_VLLM = (
    "auto",
    "fp8",
    "int4_per_token_head",
    "int8_per_token_head",
    "fp8_per_token_head",
    "turboquant_",
)
CALIBRATED = ("quality", "balanced", "small", "fast")
FEW, MANY = 8, 40  # tokens of the two calls


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("speed", "ids", "engine"))
    model_shape.add_options(parser)
    parser.add_argument(
        "--caches",
        nargs="+",
        default="auto turboquant4 fp8 int4 trellis4 int4_per_token_head".split(),
    )
    parser.add_argument(
        "--shapes",
        default="64x4096,8x32768,256x8192",
        help="requests x context, with commas, for tpot_ms",
    )
    parser.add_argument("--prompts", default="", help="requests x prompt, with commas, for ttft_ms")
    parser.add_argument(
        "--gib", type=json.loads, default={}, help="memory of the cache by its name, as JSON"
    )
    parser.add_argument(
        "--against", default="auto@TRITON_ATTN", help="of ids: further stock caches, with commas"
    )
    return parse(parser)


def parse(parser):
    """Parses the command line, with the options of engines added."""
    parser.add_argument(
        "--at-once",
        type=int,
        default=1,
        help="engines that start together; they are measured one by one",
    )
    parser.add_argument(
        "--gpus", type=int, default=1, help="GPUs that measure caches at the same time"
    )
    parser.add_argument("--start", type=float, default=150, help="seconds until an engine is ready")
    parser.add_argument("--seconds", type=float, default=1e9, help="no cache is begun after these")
    parser.add_argument(
        "--options", type=json.loads, default={}, help="further options of vLLM's engine, as JSON"
    )
    parser.add_argument("--csv", default="")
    parser.add_argument("--commit", default="")
    parser.add_argument("--cache", help=argparse.SUPPRESS)
    a = parser.parse_args()
    model_shape.complete(a)
    return a


def shapes(text):
    return [tuple(map(int, shape.split("x"))) for shape in text.split(",") if shape]


def write_model(a, folder, most):
    """Writes the configuration of a model for `most` tokens and, for meaningful tokens, its
    weights: vLLM's dummy weights are close to 0."""
    import torch
    from transformers import AutoModelForCausalLM

    config = model_shape.config(a, most, initializer_range=0.05, dtype="bfloat16")
    config.architectures = [{"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[a.model]]
    torch.manual_seed(1)
    (
        AutoModelForCausalLM.from_config(config).to(torch.bfloat16) if a.what == "ids" else config
    ).save_pretrained(folder)


def write_calibration(a, path):
    """Writes a calibration of random rows, because presets need one."""
    import numpy as np

    import kvant

    made, random = kvant.Calibrator(model="random"), np.random.default_rng(1)
    rows = random.standard_normal((256, a.kv_heads, a.head_dim), dtype=np.float32)
    for layer in range(a.layers):
        for role in "kv":
            made.add_rows(layer, role, rows)
        for head in range(a.kv_heads):
            made.add_queries(layer, head, rows[:, -1 - head])
    made.finish().save(path)


# ---- an engine, in a separate process ----


def is_cpu():
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


def cache_options(name):
    """Options of LLM for a cache, with KVANT_VLLM set where it is kvant's. NAME+codes and
    NAME+exact: without and with exact blocks."""
    name, _, kind = name.partition("+")
    if kind:
        os.environ["KVANT_VLLM_EXACT"] = {"codes": "0", "exact": "1"}[kind]
    cache, backend, dtype = (name.split("@") + ["", ""])[:3]
    chosen = {"dtype": dtype} if dtype else {}
    if cache.startswith(OF_VLLM):
        return (
            chosen | {"kv_cache_dtype": cache} | ({"attention_backend": backend} if backend else {})
        )
    os.environ["KVANT_VLLM"] = cache
    if is_cpu():
        return chosen | {"block_size": 64}
    from vllm.config import cache as config

    named = {"kv_cache_dtype": "kvant"} if hasattr(config, "register_kv_cache_dtype") else {}
    return chosen | named | {"attention_backend": "KVANT", "block_size": 64}


def without_flash_attention_2():
    """Lets vLLM use FlashAttention 3 for turboquant_* if its predecessor is not there. vLLM forces
    version 2, but version 3 works as well. The schedule of version 3 would take layers in bf16 for
    quantised layers."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.attention.backends import fa_utils, flash_attn

    if fa_utils.is_fa_version_supported(2):
        return
    made = EngineArgs.create_engine_config

    def with_any(self, *arguments, **options):
        config = made(self, *arguments, **options)
        config.attention_config.flash_attn_version = None
        return config

    EngineArgs.create_engine_config = with_any
    flash_attn.FlashAttentionMetadataBuilder._get_scheduler_metadata = lambda self, **options: None


class Filled:
    """Whether DecodeBenchConnector fills the contexts of new requests."""

    now = True

    @classmethod
    def options(cls):
        from vllm.distributed.kv_transfer.kv_connector.v1 import decode_bench_connector

        scheduler = decode_bench_connector.DecodeBenchConnectorScheduler
        found = scheduler.get_num_new_matched_tokens
        scheduler.get_num_new_matched_tokens = lambda self, *rest: (
            found(self, *rest) if cls.now else (0, False)
        )
        extra = {"kv_connector_extra_config": {"startup_fill": True}}
        return {
            "kv_transfer_config": {"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both"}
            | extra
        }


def engine(a, folder, **more):
    options = cache_options(a.cache)
    if a.cache.startswith("turboquant_"):
        without_flash_attention_2()
    every = shapes(a.shapes) + shapes(a.prompts)
    if is_cpu():
        options |= {"enforce_eager": True}
    else:
        sizes = sorted({1, 8, *(batch for batch, _ in every)})
        options |= {
            "compilation_config": {
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": sizes,
            }
        }
    from vllm import LLM

    most, weights = max(batch for batch, _ in every), "auto" if a.what == "ids" else "dummy"
    common = dict(
        model=folder,
        skip_tokenizer_init=True,
        load_format=weights,
        enable_prefix_caching=False,
        max_num_seqs=most,
    )
    return LLM(
        **common
        | dict(max_num_batched_tokens=8192, disable_log_stats=True)
        | options
        | a.options
        | more
    )


def generate(llm, prompts, n, **sampling):
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, ignore_eos=True, detokenize=False, max_tokens=n, **sampling
    )
    start = time.perf_counter()
    made = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    return time.perf_counter() - start, [x.outputs[0] for x in made]


def prompts_of(batch, context, vocabulary):
    return [
        [(i * 7919 + j * 31) % (vocabulary - 2) + 1 for j in range(context)] for i in range(batch)
    ]


def row(a, llm, batch, context):
    import torch
    import vllm

    config = llm.llm_engine.vllm_config.cache_config
    made = {
        "vllm": vllm.__version__,
        "model": a.model,
        "cache": a.cache,
        "layers": a.layers,
        "batch": batch,
        "context": context,
    }
    made["device"] = "CPU" if is_cpu() else torch.cuda.get_device_name()
    return made if a.gib else made | {"tokens_that_fit": config.num_gpu_blocks * config.block_size}


def speed_rows(a, llm):
    Filled.now = False
    for batch, context in shapes(a.prompts):
        prompts = prompts_of(batch, context, a.vocabulary)
        times = [generate(llm, prompts, 1)[0] for _ in range(3 if batch * context > 16384 else 4)][
            1:
        ]
        yield row(a, llm, batch, context) | {"ttft_ms": round(1e3 * statistics.median(times), 2)}
    Filled.now = True
    for batch, context in shapes(a.shapes):
        prompts = prompts_of(batch, context, a.vocabulary)
        generate(llm, prompts, 2)
        few, many = generate(llm, prompts, FEW)[0], generate(llm, prompts, MANY)[0]
        tpot = (many - few) / (MANY - FEW)
        yield row(a, llm, batch, context) | {
            "tpot_ms": round(1e3 * tpot, 3),
            "tokens_per_s": round(batch * MANY / many, 1),
        }


def steps(made):
    """The chosen tokens, and the most probable ones with their log-probabilities."""
    return [
        [i, {j: p.logprob for j, p in step.items()}]
        for i, step in zip(made.token_ids, made.logprobs)
    ]


def answers(a, llm):
    prompts, n = prompts_of(16, 150, a.vocabulary), 48
    yield {"name": a.cache, "prompts": [steps(x) for x in generate(llm, prompts, n, logprobs=4)[1]]}
    if a.cache == "auto":
        alone = [steps(generate(llm, [prompt], n, logprobs=4)[1][0]) for prompt in prompts]
        yield {"name": "auto, one prompt at a time", "prompts": alone}


def run_engine(a):
    """In this process: rows as lines of JSON."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(a, folder, max(n for _, n in shapes(a.shapes) + shapes(a.prompts)) + 1024)
        llm = engine(
            a, folder, **(Filled.options() if a.what == "speed" and shapes(a.shapes) else {})
        )
        print("READY", flush=True)
        sys.stdin.readline()
        for made in (speed_rows if a.what == "speed" else answers)(a, llm):
            print("ROW", json.dumps(made), flush=True)


# ---- the engines together ----


class Engine:
    """A process that measures one cache. `words`: its command line after Python's name."""

    def __init__(self, cache, words, start, environment):
        self.cache, self.lines, self.start = cache, queue.Queue(), start
        self.end = time.monotonic() + start
        self.child = subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.child.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def ready(self):
        """Waits for its start."""
        try:
            while (
                line := self.lines.get(timeout=max(0.1, self.end - time.monotonic()))
            ) is not None:
                if line == "READY\n":
                    return
            self.lines.put(None)  # for rows: it ended
        except queue.Empty:
            print(f"{self.cache}: not ready after {self.start:g} s (--start)", file=sys.stderr)
            self.child.kill()

    def rows(self):
        """Yields results as soon as they are there."""
        try:
            self.child.stdin.write("\n")
            self.child.stdin.close()
        except OSError:
            pass
        while (line := self.lines.get()) is not None:
            if line.startswith("ROW "):
                yield json.loads(line[4:])
        if self.child.wait():
            print(f"{self.cache}: the engine ended with {self.child.returncode}", file=sys.stderr)


def write_csv(path, rows, columns=COLUMNS):
    with pathlib.Path(path).open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def engine_of(a, cache, what, environment):
    options = a.options | (
        {"kv_cache_memory_bytes": int(a.gib[cache] * 2**30)} if cache in a.gib else {}
    )
    words = [__file__, "engine", "--cache", cache, "--shapes", a.shapes, "--prompts", a.prompts]
    words += ["--options", json.dumps(options), "--gib", json.dumps(a.gib), *model_shape.words(a)]
    environment |= {"BENCH_VLLM": what, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return Engine(cache, words, a.start, environment)


def measure(a, made_engine, command, columns):
    """Starts the engines of all caches, a.at_once together on each GPU, and writes each measurement
    as soon as it is there."""
    end, rows, caches = time.monotonic() + a.seconds, [], iter(a.caches)
    visible, lock = os.environ.get("CUDA_VISIBLE_DEVICES", ""), threading.Lock()
    gpus = visible.split(",") if visible else list(map(str, range(a.gpus)))

    def next_caches():
        with lock:
            return list(itertools.islice(caches, a.at_once)) if time.monotonic() < end else []

    def keep(made):
        with lock:
            rows.append(made | {"commit": a.commit, "command": command})
            print(",".join(str(made.get(name, "")) for name in columns), flush=True)
            if a.csv:
                write_csv(a.csv, rows, columns)

    def on(environment):
        while some := next_caches():
            engines = [made_engine(a, cache, dict(environment)) for cache in some]
            for one in engines:
                one.ready()
            for one in engines:
                for made in one.rows():
                    keep(made)

    if a.gpus == 1:
        on({})
        return
    with futures.ThreadPoolExecutor(a.gpus) as pool:
        list(pool.map(on, ({"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus[: a.gpus])))


def speed(a):
    def made(a, cache, environment):
        return engine_of(a, cache, "speed", environment)

    measure(a, made, "bench_vllm.py speed", COLUMNS)


def compare(stock, other):
    """The index where tokens first differ, and the differences of log-probabilities before it,
    where both runs have the same tokens."""
    firsts, gaps, changes = [], [], []
    for x, y in zip(stock, other):
        n = next((j for j in range(len(x)) if x[j][0] != y[j][0]), len(x))
        firsts.append(n)
        changes += [abs(p[i] - q[i]) for (_, p), (_, q) in zip(x[: n + 1], y) for i in p if i in q]
        if n < len(x):
            gaps.append(x[n][1][x[n][0]] - x[n][1].get(y[n][0], -float("inf")))
    equal = sum(n == len(x) for n, x in zip(firsts, stock))
    most = (
        f"log-probabilities differ by {statistics.median(changes):.5f}, at most {max(changes):.5f}"
    )
    close = " ".join(f"{gap:.5f}" for gap in sorted(gaps))
    return (
        f"{equal} of {len(stock)} prompts equal; {most}; where tokens differ stock's two are "
        f"apart by: {close or '-'}; after {firsts}"
    )


def ids(a):
    """A small model: compares tokens of vLLM's own cache with tokens of exactly stored rows, and
    with tokens of vLLM's own cache on further backends."""
    a.layers, a.hidden, a.feed_forward, a.vocabulary = 2, 512, 1024, 1024
    a.heads, a.kv_heads, a.head_dim = 8, 2, 64
    a.options, a.shapes, a.prompts = {"gpu_memory_utilization": 0.1} | a.options, "16x512", ""
    against = [name for name in a.against.split(",") if name]
    in_float = [f"{name}@float32" for name in against] + ["f32/f32@@float32"]
    engines = [engine_of(a, cache, "ids", {}) for cache in ("auto", "f32/f32", *against, *in_float)]
    for one in engines:
        one.ready()
    found = {}
    for name, made in ((made["name"], made) for one in engines for made in one.rows()):
        found[name] = [
            [(i, {int(j): p for j, p in of.items()}) for i, of in prompt]
            for prompt in made["prompts"]
        ]
        stock = in_float[0] if name in in_float else "auto"
        if name != stock and stock in found:
            print(f"{name} compared with {stock}: {compare(found[stock], found[name])}", flush=True)
    if not {"auto", "f32/f32"} <= found.keys():
        sys.exit("an engine did not start")


def main():
    a = arguments()
    if a.what == "engine":
        a.what = os.environ["BENCH_VLLM"]
        run_engine(a)
        return
    with tempfile.TemporaryDirectory() as folder:
        if (
            a.what == "speed"
            and any(cache in CALIBRATED or "=file" in cache for cache in a.caches)
            and "KVANT_VLLM_CALIBRATION" not in os.environ
        ):
            os.environ["KVANT_VLLM_CALIBRATION"] = f"{folder}/random.kvcal"
            write_calibration(a, os.environ["KVANT_VLLM_CALIBRATION"])
        {"speed": speed, "ids": ids}[a.what](a)


if __name__ == "__main__":
    main()
