#!/usr/bin/env python3
"""vLLM with kvant's blocks beside its own caches, with random weights: CSV rows on stdout, one per cache and shape, and in a
file. vLLM and kvant must be importable, kvant as a plug-in (its wheel).

    bench/bench_vllm.py speed --csv vllm.csv                  # Llama 3.1 8B's shape on a GPU
    bench/bench_vllm.py speed --csv vllm.csv --caches auto,turboquant4,int4 --shapes 4x1024 --layers 8 --hidden 576 \\
        --heads 9 --kv-heads 3 --head-dim 64 --feed-forward 1536 --vocabulary 49152     # on a CPU
    bench/bench_vllm.py ids                                   # an exact codec beside vLLM's own cache: equal tokens

Contexts are not computed: vLLM's DecodeBenchConnector fills blocks with constants. tpot_ms: wall time per step of all
requests, from two calls with few and many tokens; tokens_that_fit: blocks that vLLM counts x tokens per block; ttft_ms: of
one request that is computed. Caches: a dtype of vLLM's cache, or a name of KVANT_VLLM."""

import argparse
import csv
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

COLUMNS = "device vllm cache layers batch context tpot_ms tokens_per_s tokens_that_fit cache_gib ttft_ms".split()
OF_VLLM = ("auto", "fp8", "int4_per_token_head", "int8_per_token_head", "fp8_per_token_head", "turboquant_")
FEW, MANY = 8, 40  # tokens of the two calls


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "ids", "engine"))
    shape = dict(layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, feed_forward=14336, vocabulary=128256)
    for name, default in shape.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    parser.add_argument("--caches", default="auto,turboquant4,fp8,int4,trellis4,int4_per_token_head")
    parser.add_argument("--shapes", default="64x4096,8x32768,256x8192", help="requests x context, with commas")
    parser.add_argument("--prompt", type=int, default=0, help="tokens of a prompt for ttft_ms; 0: none")
    parser.add_argument("--seconds", type=float, default=1e9, help="no cache is begun after these")
    parser.add_argument("--options", type=json.loads, default={}, help="further options of vllm.LLM, as JSON")
    parser.add_argument("--csv", default="")
    parser.add_argument("--cache", help=argparse.SUPPRESS)
    return parser.parse_args()


def write_model(a, folder):
    """Its configuration; for tokens that mean something its weights, too: vLLM's dummy ones are close to 0."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    most = max(context for _, context in shapes(a)) + 1024
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        num_hidden_layers=a.layers,
        hidden_size=a.hidden,
        num_attention_heads=a.heads,
        num_key_value_heads=a.kv_heads,
        head_dim=a.head_dim,
        intermediate_size=a.feed_forward,
        vocab_size=a.vocabulary,
        max_position_embeddings=most,
        initializer_range=0.05,
        dtype="bfloat16",
    )
    torch.manual_seed(1)
    (LlamaForCausalLM(config).to(torch.bfloat16) if a.what == "ids" else config).save_pretrained(folder)


def shapes(a):
    return [tuple(map(int, shape.split("x"))) for shape in a.shapes.split(",")]


def is_cpu():
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


def cache_options(cache):
    """Options of LLM for a cache, with KVANT_VLLM set where it is kvant's."""
    if cache.startswith(OF_VLLM):
        return {"kv_cache_dtype": cache}
    os.environ["KVANT_VLLM"] = cache
    if is_cpu():
        return {"block_size": 64}
    from vllm.config import cache as config

    return {"attention_backend": "KVANT", "block_size": 64} | ({"kv_cache_dtype": "kvant"} if hasattr(config, "register_kv_cache_dtype") else {})


def engine(a, folder, **more):
    options = cache_options(a.cache)
    if is_cpu():
        options |= {"enforce_eager": True}
    else:
        sizes = sorted({1, 8, *(batch for batch, _ in shapes(a))})
        options |= {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}}
    from vllm import LLM

    most, weights = max(batch for batch, _ in shapes(a)), "auto" if a.what == "ids" else "dummy"
    common = dict(model=folder, skip_tokenizer_init=True, load_format=weights, enable_prefix_caching=False, max_num_seqs=most)
    return LLM(**common | dict(max_num_batched_tokens=8192, disable_log_stats=True) | options | a.options | more)


def generate(llm, prompts, n):
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=n)
    start = time.perf_counter()
    made = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    return time.perf_counter() - start, [list(x.outputs[0].token_ids) for x in made]


def prompts_of(batch, context, vocabulary):
    return [[(i * 7919 + j * 31) % (vocabulary - 2) + 1 for j in range(context)] for i in range(batch)]


def row(a, llm):
    import torch
    import vllm

    config = llm.llm_engine.vllm_config.cache_config
    device = "CPU" if is_cpu() else torch.cuda.get_device_name()
    fit = config.num_gpu_blocks * config.block_size
    return {"device": device, "vllm": vllm.__version__, "cache": a.cache, "layers": a.layers, "tokens_that_fit": fit}


def decode_rows(a, folder):
    connector = {"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"startup_fill": True}}
    llm = engine(a, folder, kv_transfer_config=connector)
    for batch, context in shapes(a):
        prompts = prompts_of(batch, context, a.vocabulary)
        generate(llm, prompts, 2)
        few, many = generate(llm, prompts, FEW)[0], generate(llm, prompts, MANY)[0]
        tpot = (many - few) / (MANY - FEW)
        yield row(a, llm) | {"batch": batch, "context": context, "tpot_ms": round(1e3 * tpot, 3), "tokens_per_s": round(batch * MANY / many, 1)}


def prompt_rows(a, folder):
    llm = engine(a, folder)
    prompt = prompts_of(1, a.prompt, a.vocabulary)
    times = sorted(generate(llm, prompt, 1)[0] for _ in range(4))
    yield row(a, llm) | {"batch": 1, "context": a.prompt, "ttft_ms": round(1e3 * times[0], 2)}


def run_engine(a):
    """In this process: rows as lines of JSON."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(a, folder)
        if a.what == "ids":
            found = generate(engine(a, folder), prompts_of(5, 150, a.vocabulary), 24)[1]
            print("ROW", json.dumps({"cache": a.cache, "ids": found}), flush=True)
            return
        for made in prompt_rows(a, folder) if a.prompt else decode_rows(a, folder):
            print("ROW", json.dumps(made), flush=True)


def begun(a, cache, what):
    """An engine in a process of its own."""
    words = [sys.executable, __file__, "engine", "--cache", cache, "--prompt", str(a.prompt), "--options", json.dumps(a.options)]
    for name in "layers hidden heads kv_heads head_dim feed_forward vocabulary shapes".split():
        words += ["--" + name.replace("_", "-"), str(getattr(a, name))]
    environment = os.environ | {"BENCH_VLLM": what, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)


def rows_of(cache, child):
    """As they come."""
    with child:
        for line in child.stdout:
            if line.startswith("ROW "):
                yield json.loads(line[4:])
    if child.returncode:
        print(f"{cache}: the engine ended with {child.returncode}", file=sys.stderr)


def speed(a):
    end, rows = time.monotonic() + a.seconds, []
    for cache in a.caches.split(","):
        if time.monotonic() < end:
            for made in rows_of(cache, begun(a, cache, "speed")):
                rows.append(made)
                print(",".join(str(made.get(name, "")) for name in COLUMNS), flush=True)
                if a.csv:
                    with pathlib.Path(a.csv).open("w", newline="") as file:
                        writer = csv.DictWriter(file, COLUMNS)
                        writer.writeheader()
                        writer.writerows(rows)


def ids(a):
    """A small model: tokens of vLLM's own cache and of rows kept exactly."""
    a.layers, a.hidden, a.heads, a.kv_heads, a.head_dim, a.feed_forward, a.vocabulary, a.shapes = 2, 512, 8, 2, 64, 1024, 1024, "5x512"
    a.options = {"gpu_memory_utilization": 0.1} | a.options
    children = {cache: begun(a, cache, "ids") for cache in ("auto", "f32/f32", "turboquant4")}
    found = {cache: [made["ids"] for made in rows_of(cache, child)] for cache, child in children.items()}
    if not (found["auto"] and found["f32/f32"]):
        sys.exit("an engine did not start")
    stock = found["auto"][0]
    for cache in ("f32/f32", "turboquant4"):
        for ours in found[cache]:
            firsts = [next((j for j in range(len(x)) if x[j] != y[j]), len(x)) for x, y in zip(stock, ours)]
            kinds = len({x for ids in ours for x in ids})
            print(f"{cache}: tokens until the first that differs, of {len(stock[0])}: {firsts}; {kinds} different tokens")


def main():
    a = arguments()
    if a.what == "engine":
        a.what = os.environ["BENCH_VLLM"]
        run_engine(a)
    else:
        {"speed": speed, "ids": ids}[a.what](a)


if __name__ == "__main__":
    main()
