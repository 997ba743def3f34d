#!/usr/bin/env python3
"""Measures requests that run at once in vLLM, with kvant's blocks and with vLLM's own caches. The
weights are random, each cache has an engine, and the CSV goes to stdout and into a file. vLLM and
kvant must be importable, kvant as a plug-in (its wheel).

    bench/vllm_serving.py --csv vllm_serving.csv                        # Qwen3 8B's shape on a GPU
    bench/vllm_serving.py --csv vllm_serving.csv --caches auto turboquant4 --gib 0 --prompts 512 \\
        --filled 2x512 --served 1x64,4x64 --output 16 --layers 2 --hidden 256 --heads 4 \\
        --kv-heads 2 --head-dim 64 --feed-forward 512 --vocabulary 1024          # on a CPU

Each engine is vLLM's AsyncLLM, which `vllm serve` uses, without HTTP. All caches get the same
memory (--gib), so a smaller cache holds more requests. Requests without room wait. Kinds of
measurements:

    prompt   one prompt of `input` tokens: the median time until its first token
    filled   `concurrency` requests whose contexts DecodeBenchConnector fills with constants:
             tpot_ms is the time of a step of all requests
    served   `requests` prompts that are computed, at most `concurrency` at once, each with `output`
             tokens. tps_system: output tokens per second from the first prompt to the last token.
             tps_request: output tokens over the time after the first token. ttft_ms and tpot_ms are
             means of all requests."""

import asyncio
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time

import bench_vllm
import model_shape
from record import options_of

COLUMNS = (
    "device vllm commit command model cache gib tokens_that_fit kind concurrency input output "
    "requests tps_system tps_request ttft_ms ttft_p99_ms tpot_ms"
).split()
GRAPHS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # batches that get a CUDA graph
# Tokens of a request of `filled`: more than four blocks, because kvant encodes whole blocks.
FILLED = 264
WARM = 2048  # tokens of the first prompts, from which presets learn their transforms


def arguments():
    parser = options_of(__doc__)
    model_shape.add_options(parser)
    parser.set_defaults(model="qwen3")
    parser.add_argument(
        "--caches", nargs="+", default="auto kvant fast fp8 int4 bdr4 turboquant4".split()
    )
    parser.add_argument(
        "--gib", type=float, default=48, help="memory of each cache; 0: what vLLM chooses"
    )
    parser.add_argument("--prompts", default="8192", help="tokens of prompts, with commas")
    parser.add_argument(
        "--filled", default="64x4096,8x32768,1x1024", help="requests x context, with commas"
    )
    parser.add_argument(
        "--served",
        default="1x256,4x256,16x256,64x256,256x256,1x8192,4x8192,16x8192,64x8192,1x16384,4x16384,"
        "16x16384,64x16384",
        help="requests at once x prompt, with commas, in this order",
    )
    parser.add_argument(
        "--served-of",
        type=json.loads,
        default={},
        help="a list by a cache's name, as JSON, in place of --served",
    )
    parser.add_argument(
        "--budget", type=float, default=1e9, help="seconds after which an engine begins no `served`"
    )
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument(
        "--waves", type=float, default=1, help="requests per request that runs at once"
    )
    a = bench_vllm.parse(parser)
    a.what = "speed"  # of bench_vllm: the model has no weights
    return a


# ---- an engine, in a separate process ----


class Client:
    """Sends requests to an engine and takes their times."""

    def __init__(self, a, engine):
        self.a, self.engine, self.sent = a, engine, 0

    async def request(self, ids, n, kind):
        """One request: its times of the first and the last token, in seconds after its start."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            max_tokens=n,
            output_kind=RequestOutputKind.DELTA,
        )
        self.sent += 1
        start, first, tokens = time.perf_counter(), None, 0
        made = self.engine.generate({"prompt_token_ids": ids}, sampling, f"{kind}-{self.sent}")
        async for part in made:
            tokens += len(part.outputs[0].token_ids)
            first = first or time.perf_counter()
        if tokens != n:
            raise RuntimeError(f"a request has {tokens} tokens instead of {n}")
        return first - start, time.perf_counter() - start

    async def requests(self, count, at_once, input, n, kind):
        """The times of all requests, and the time of all of them together."""
        prompts = iter(bench_vllm.prompts_of(count, input, self.a.vocabulary))
        times = []

        async def one_after_another():
            for ids in prompts:
                times.append(await self.request(ids, n, kind))

        start = time.perf_counter()
        await asyncio.gather(*(one_after_another() for _ in range(at_once)))
        return times, time.perf_counter() - start

    async def prompt(self, input):
        times = [(await self.requests(1, 1, input, 1, "prompt"))[1] for _ in range(5)][1:]
        yield {"input": input, "output": 1} | {"ttft_ms": round(1e3 * statistics.median(times), 2)}

    async def filled(self, batch, context):
        """The step's time is the time between two tokens of the request that was filled last: from
        its first token on, all requests decode. So the time of filling has no part in it."""
        await self.requests(batch, batch, context, 2, "filled")
        times, _ = await self.requests(batch, batch, context, FILLED, "filled")
        first, last = max(times)
        yield {"concurrency": batch, "input": context, "output": FILLED, "requests": batch} | {
            "tpot_ms": round(1e3 * (last - first) / (FILLED - 1), 3)
        }

    async def served(self, at_once, input):
        n, count = self.a.output, max(1, round(at_once * self.a.waves))
        times, seconds = await self.requests(count, at_once, input, n, "served")
        firsts = sorted(first for first, _ in times)
        decodes = [last - first for first, last in times]
        yield {
            "concurrency": at_once,
            "input": input,
            "output": n,
            "requests": count,
            "tps_system": round(count * n / seconds, 2),
            "tps_request": round(statistics.mean(n / x for x in decodes), 2),
            "ttft_ms": round(1e3 * statistics.mean(firsts), 2),
            "ttft_p99_ms": round(1e3 * firsts[min(count - 1, int(0.99 * count))], 2),
            "tpot_ms": round(1e3 * statistics.mean(decodes) / (n - 1), 3),
        }

    async def everything(self):
        """Yields the measurements, the ones that decide most first."""
        for input in filter(None, self.a.prompts.split(",")):
            async for made in self.prompt(int(input)):
                yield {"kind": "prompt", "concurrency": 1, "requests": 4} | made
        for shape in bench_vllm.shapes(self.a.filled):
            async for made in self.filled(*shape):
                yield {"kind": "filled"} | made
        end = time.monotonic() + self.a.budget
        for shape in bench_vllm.shapes(self.a.served):
            if time.monotonic() > end:
                return
            async for made in self.served(*shape):
                yield {"kind": "served"} | made


def share_of_exact():
    """The part of a cache's memory that kvant's exact blocks take next to vLLM's blocks."""
    if not os.environ.get("KVANT_VLLM") or bench_vllm.is_cpu():
        return 0
    from kvant.vllm import chosen, exact

    return exact.SHARE if exact.is_wanted(*chosen()[:2]) else 0


def options(a, folder):
    """Options of vLLM's engine."""
    made = bench_vllm.cache_options(a.cache.replace("kvant", "balanced", 1))
    if bench_vllm.is_cpu():
        made |= {"enforce_eager": True}
    else:
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        made |= {"compilation_config": graphs | {"cudagraph_capture_sizes": list(GRAPHS)}}
    if a.gib:
        made["kv_cache_memory_bytes"] = int((1 - share_of_exact()) * a.gib * 2**30)
        if not bench_vllm.is_cpu():  # vLLM only checks then that so much of a GPU is free
            made["gpu_memory_utilization"] = 0.1
    if a.filled:
        made["kv_transfer_config"] = {
            "kv_connector": "DecodeBenchConnector",
            "kv_connector_module_path": "filled_requests",
            "kv_role": "kv_both",
        }
    common = dict(
        model=folder,
        skip_tokenizer_init=True,
        load_format="dummy",
        enable_prefix_caching=False,
        max_num_seqs=max(GRAPHS),
        max_num_batched_tokens=8192,
        disable_log_stats=True,
    )
    return common | made | a.options


async def run(a, folder):
    import torch
    import vllm
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**options(a, folder)))
    print("READY", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    cache, client = engine.vllm_config.cache_config, Client(a, engine)
    of_all = {
        "device": "CPU" if bench_vllm.is_cpu() else torch.cuda.get_device_name(),
        "vllm": vllm.__version__,
        "model": a.model,
        "cache": a.cache,
        "gib": f"{a.gib:g}" if a.gib else "",
        "tokens_that_fit": (cache.num_gpu_blocks or 0) * cache.block_size,
    }
    for what in ("first", "second"):  # presets learn from the first
        seconds = (await client.requests(2, 2, WARM, 4, "warm"))[1]
        print(f"{a.cache}: {what} prompts took {seconds:.2f} s", file=sys.stderr, flush=True)
    async for made in client.everything():
        print("ROW", json.dumps(of_all | made), flush=True)
    engine.shutdown()


def engine_of(a, cache, environment):
    words = [__file__, "--cache", cache, "--gib", str(a.gib), "--output", str(a.output)]
    words += ["--prompts", a.prompts, "--filled", a.filled]
    words += ["--served", a.served_of.get(cache, a.served), "--budget", str(a.budget)]
    words += ["--waves", str(a.waves), "--options", json.dumps(a.options), *model_shape.words(a)]
    here = str(pathlib.Path(__file__).resolve().parent)
    path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    return bench_vllm.Engine(cache, words, a.start, environment | {"PYTHONPATH": path})


def main():
    a = arguments()
    if not a.cache:
        command = f"vllm_serving.py --gib {a.gib:g} --at-once {a.at_once}"
        command += f" --gpus {a.gpus}" if a.gpus > 1 else ""
        bench_vllm.measure(a, engine_of, command, COLUMNS)
        return
    with tempfile.TemporaryDirectory() as folder:
        lengths = [n for _, n in bench_vllm.shapes(f"{a.filled},{a.served}")]
        lengths += [WARM, *map(int, filter(None, a.prompts.split(",")))]
        bench_vllm.write_model(a, folder, max(lengths) + a.output + 1024)
        asyncio.run(run(a, folder))


if __name__ == "__main__":
    main()
