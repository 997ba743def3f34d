"""Prints the output of a vLLM engine as JSON on stdout, on a GPU if there is one and otherwise on
the CPU.

Arguments: the folder of a model, then options of LLM as JSON, then requests as JSON. A request has
prompts as token ids, and options of SamplingParams; "adapter" is the folder of a LoRA adapter. With
KVANT_VLLM the cache is kvant's. With TEST_GPU_PAGES attention is the GPU backend's, on the mock
that KVANT_CUDA_LIBRARY names. With TEST_EXACT all codecs have exact blocks, `few` or `all`. With
TEST_WRONG_ATTENTION outputs are twice as large as they should be.

Without arguments it reads jobs from stdin, one line of JSON each: arguments, environment, and a
file for the engine's messages. Each job is a new process that begins with vLLM imported, because
the import takes twice as long as the rest of a small model's job.
"""

import gc
import importlib
import json
import os
import sys
import pathlib
import traceback

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_LOGGING_LEVEL=os.environ.get("TEST_LOGGING", "ERROR"),
    VLLM_NO_USAGE_STATS="1",
    VLLM_WORKER_MULTIPROC_METHOD="spawn",  # ranks: a process that asked for GPUs must not fork
)
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "integrations" / "python"))
import kvant.vllm  # noqa: E402

import torch  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402


def clear_blocks(runner, block_ids):
    """Clears blocks as a GPU's runner does. The CPU's runner mistakes blocks that are split for
    whole blocks.
    """
    from vllm.v1.kv_cache_interface import group_kernel_blocks

    layers = runner.compilation_config.static_forward_context
    for name in {
        name for group in runner.kv_cache_config.kv_cache_groups for name in group.layer_names
    }:
        if isinstance(layers[name].kv_cache, torch.Tensor):
            group_kernel_blocks(layers[name].kv_cache, runner.kv_cache_config.num_blocks)[
                block_ids
            ] = 0


def use_gpu_pages():
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    from kvant.vllm import cpu, gpu, impl

    cpu.Backend.get_impl_cls = staticmethod(lambda: gpu.Impl)
    cpu.Backend.get_supported_kernel_block_sizes = impl.Backend.get_supported_kernel_block_sizes
    CPUModelRunner._zero_block_ids = clear_blocks


def use_exact_blocks(how):
    """`few`: a pool that is full soon. `all`: a pool that keeps every block. Counts blocks of steps
    that were exact and that were not, and rows that were sealed.
    """
    from kvant.vllm import exact

    exact.is_possible = exact.is_wanted = lambda *of: True
    sizes = {"few": (exact.LEAST, exact.LEAST), "all": (16, 96)}
    exact.slots_of = lambda *of: exact.Slots(*sizes[how])
    exact.NEWEST = exact.NEWEST if how == "few" else 99
    plan, counts = exact.State.step, {"exact": 0, "sealed": 0, "listed": 0}

    def step(self, starts, lengths, table, slots):
        made = plan(self, starts, lengths, table, slots)
        for entries, n in zip(self.table.tolist(), lengths.tolist()):
            used = entries[: -(-n // 64)]
            counts["exact"] += sum(x < 0 for x in used)
            counts["sealed"] += sum(x >= 0 for x in used)
        counts["listed"] += int(self.n_sealed)
        return made

    exact.State.step = step
    return counts


def make_attention_wrong():
    from kvant.vllm import gpu_pages, pages

    def doubled(attend):
        def made(self, q, out, *rest):
            attend(self, q, out, *rest)
            out.mul_(2)

        return made

    for kind in (pages.LayerPages, gpu_pages.LayerPages):
        kind.attend = doubled(kind.attend)


def adapter_request(folder):
    from vllm.lora.request import LoRARequest

    return {"lora_request": LoRARequest("adapter", 1, folder)} if folder else {}


def of_device():
    """Options of LLM: on a GPU with little memory, decode steps as CUDA graphs, and a type that
    FlashAttention accepts.
    """
    if not torch.cuda.is_available():
        return {"enforce_eager": True, "dtype": "float32"}
    graphs = {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16],
    }
    made = {
        "gpu_memory_utilization": 0.1,
        "kv_cache_memory_bytes": 1 << 28,
        "compilation_config": graphs,
        "dtype": "float16",
    }
    return made | (
        {"attention_backend": "KVANT", "kv_cache_dtype": "kvant"}
        if os.environ.get("KVANT_VLLM")
        else {}
    )


def gaps(steps):
    """By how much the log-probabilities of the two most probable tokens differ."""
    best = [sorted(p.logprob for p in step.values())[-2:] for step in steps or []]
    return [second - first for first, second in best]


def first_of(steps):
    """The log-probabilities of a first token, in the order of tokens."""
    return [p.logprob for _, p in sorted(steps[0].items())] if steps else []


def run(folder, options, rounds):
    options, rounds = json.loads(options), json.loads(rounds)
    kvant.vllm.register()  # vLLM's entry point does this in an installed wheel
    if os.environ.get("TEST_GPU_PAGES"):
        use_gpu_pages()
    how = os.environ.get("TEST_EXACT")
    exact = use_exact_blocks(how) if how else {}
    if os.environ.get("TEST_WRONG_ATTENTION"):
        make_attention_wrong()
    common = dict(model=folder, skip_tokenizer_init=True, block_size=64, max_model_len=1024)
    llm = LLM(**common | of_device() | options)
    found, apart, first = [], [], []
    for prompts, sampling in rounds:
        adapter = adapter_request(sampling.pop("adapter", None))
        made = llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts],
            SamplingParams(ignore_eos=True, detokenize=False, **sampling),
            use_tqdm=False,
            **adapter,
        )
        found.append(
            [
                {"ids": [list(one.token_ids) for one in x.outputs], "cached": x.num_cached_tokens}
                for x in made
            ]
        )
        apart.append([[gaps(one.logprobs) for one in x.outputs] for x in made])
        first.append([first_of(x.outputs[0].logprobs) for x in made])
    counts = (
        {x.name: x.value for x in llm.get_metrics() if hasattr(x, "value")}
        if "disable_log_stats" in options
        else {}
    )
    config = llm.llm_engine.vllm_config
    layers = config.compilation_config.static_forward_context.values()
    made = {
        "modules": sorted({type(x.impl).__module__ for x in layers if hasattr(x, "impl")}),
        "blocks": config.cache_config.num_gpu_blocks,
        "rounds": found,
        "gaps": apart,
        "first": first,
        "counts": counts,
        "exact": exact,
    }
    print("RESULT", json.dumps(made))


def run_job(arguments, environment, out):
    """Runs a job in a new process, as a program with these arguments and these additional
    variables.
    """
    file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.environ.update(environment)
    try:
        run(*arguments)
    except Exception:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(0)


def serve():
    """This process starts no thread, because a fork would lack it. Each engine collects garbage
    seven times. With gc.freeze() the collector skips imported objects.
    """
    importlib.import_module("vllm.v1.worker.cpu_worker")  # as an engine does
    gc.freeze()
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            run_job(**json.loads(line))
        os.waitpid(child, 0)
        print("DONE", flush=True)


if __name__ == "__main__":
    run(*sys.argv[1:]) if sys.argv[1:] else serve()
