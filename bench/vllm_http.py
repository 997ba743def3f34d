#!/usr/bin/env python3
"""`vllm bench serve` against `vllm serve`, with the caches, models and columns of vllm_serving.py.
The lines' kind is `http`. The model has random weights and a tokenizer of one word per token.

    bench/vllm_http.py --csv vllm_http.csv --caches auto kvant --served 64x256,16x8192

The servers of all caches start together, each with --gib of memory for its cache, and are measured
one by one. A server that does not answer within --start seconds and requests that fail are
errors."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

import bench_vllm
import vllm_serving

VLLM = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
NAME, PORT = "random", 8017


def write_tokenizer(folder, vocabulary):
    """Writes a tokenizer of the words w0, w1, ...: a text has as many tokens as words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(vocabulary - 1)} | {"<unk>": vocabulary - 1}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.save(f"{folder}/tokenizer.json")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
    pathlib.Path(folder, "tokenizer_config.json").write_text(json.dumps(config))


def flags(options):
    """Options of vLLM's engine as words of its command line."""
    for name, value in options.items():
        word = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{word}" if value else f"--no-{word}"
        else:
            yield from (f"--{word}", json.dumps(value) if isinstance(value, dict) else str(value))


class Server:
    """`vllm serve` with a cache. If there are several GPUs, each server has one."""

    def __init__(self, a, cache, folder, number):
        a.cache = cache
        self.cache, self.folder, self.port = cache, folder, PORT + number
        self.end = time.monotonic() + a.start
        options = vllm_serving.options(a, folder)
        for not_here in ("model", "skip_tokenizer_init"):
            options.pop(not_here)
        words = ["serve", folder, "--served-model-name", NAME, "--port", str(self.port)]
        gpu = {"CUDA_VISIBLE_DEVICES": str(number % a.gpus)} if a.gpus > 1 else {}
        self.child = subprocess.Popen(
            VLLM + words + list(flags(options)), stdout=sys.stderr, env=os.environ | gpu
        )
        os.environ.pop("KVANT_VLLM", None)

    def wait_until_ready(self):
        while time.monotonic() < self.end:
            if self.child.poll() is not None:
                sys.exit(f"{self.cache}: the server ended with {self.child.returncode}")
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5)
                return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        sys.exit(f"{self.cache}: the server does not answer in time (--start)")

    def measure(self, at_once, input, output, requests):
        """The result of `vllm bench serve`, as it writes it."""
        words = ["bench", "serve", "--backend", "openai", "--model", NAME]
        words += ["--tokenizer", self.folder, "--port", str(self.port), "--ignore-eos"]
        words += ["--dataset-name", "random", "--random-input-len", str(input)]
        words += ["--random-output-len", str(output), "--num-prompts", str(requests)]
        words += ["--max-concurrency", str(at_once), "--save-result"]
        words += ["--result-dir", self.folder, "--result-filename", "result.json"]
        subprocess.run(VLLM + words, check=True, stdout=sys.stderr)
        found = json.loads(pathlib.Path(self.folder, "result.json").read_text())
        if found["completed"] != requests or found["total_output_tokens"] != output * requests:
            done = f"{found['completed']} of {requests} requests"
            sys.exit(f"{self.cache}, {at_once} x {input}: only {done} are complete")
        return found

    def rows(self, a):
        import vllm

        self.measure(2, vllm_serving.WARM, 4, 2)  # presets learn from these prompts
        for at_once, input in bench_vllm.shapes(a.served):
            requests = max(1, round(at_once * a.waves))
            found = self.measure(at_once, input, a.output, requests)
            yield {
                "device": "CPU" if bench_vllm.is_cpu() else a.device,
                "vllm": vllm.__version__,
                "model": a.model,
                "cache": self.cache,
                "gib": f"{a.gib:g}" if a.gib else "",
                "kind": "http",
                "concurrency": at_once,
                "input": input,
                "output": a.output,
                "requests": requests,
                "tps_system": round(found["output_throughput"], 2),
                "tps_request": round(1e3 / found["mean_tpot_ms"], 2),
                "ttft_ms": round(found["mean_ttft_ms"], 2),
                "ttft_p99_ms": round(found["p99_ttft_ms"], 2),
                "tpot_ms": round(found["mean_tpot_ms"], 3),
            }


def device_name():
    """Asked in another process: vLLM's server needs the GPU's memory."""
    words = [sys.executable, "-c", "import torch; print(torch.cuda.get_device_name())"]
    return subprocess.run(words, capture_output=True, text=True).stdout.strip()


def main():
    a, found = vllm_serving.arguments(), []
    a.prompts = a.filled = ""
    command = f"vllm_http.py --gib {a.gib:g}" + (f" --gpus {a.gpus}" if a.gpus > 1 else "")
    a.device = device_name()
    with tempfile.TemporaryDirectory() as folder:
        most = max(n for _, n in bench_vllm.shapes(a.served))
        bench_vllm.write_model(a, folder, max(most, vllm_serving.WARM) + a.output + 1024)
        write_tokenizer(folder, a.vocabulary)
        servers = [Server(a, cache, folder, i) for i, cache in enumerate(a.caches)]
        try:
            for server in servers:
                server.wait_until_ready()
            for made in (row for server in servers for row in server.rows(a)):
                found.append(made | {"commit": a.commit, "command": command})
                print(
                    ",".join(str(made.get(name, "")) for name in vllm_serving.COLUMNS), flush=True
                )
                if a.csv:
                    bench_vllm.write_csv(a.csv, found, vllm_serving.COLUMNS)
        finally:
            for server in servers:
                server.child.terminate()
            for server in servers:
                server.child.wait()


if __name__ == "__main__":
    main()
