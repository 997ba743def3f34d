"""Measures caches with each program's own llama-perplexity: KL divergence to that program's own f16
cache on the same text and positions, and the bits of everything that the cache holds at that
length. It owns what is read from the programs' logs, and refuses a log that lacks a number."""

import os
import re
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

from programs import CUDA_VERSION, folder, start, version
from record import append, context, first_line, model_name, read_rows
from systems import HOSTS, LOUD, QUIRKS, needs_gpu

NUMBER = r"(-?[\d.]+(?:e[-+]?\d+)?)"
FOUND = {
    "ppl": rf"Mean PPL\(Q\) *: *{NUMBER}",
    "kld_mean": rf"Mean +KLD: *{NUMBER}",
    "kld_se": rf"Mean +KLD: *{NUMBER} *\S+ *{NUMBER}",
    "kld_p99": rf"99\.0% +KLD: *{NUMBER}",
    "top1": rf"Same top p: *{NUMBER}",
}
# llama.cpp prints a line for each of the model's caches; windows have their own.
CACHE_MIB = r"(?:llama_kv_cache: size|KV self size) *= *([\d.]+) MiB"
GPU_NAME = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
# On a GPU kvant leaves a cache as f16 while memory suffices, unless it is told not to. It counts
# the graphs that its device computed there when it is verbose.
KVANT = {"KVANT_EXACT": "0", "KVANT_VERBOSE": "1"}
GPU_GRAPHS = r"kvant: KVANT\S*: [1-9]\d* graphs"
WRITING = threading.Lock()  # only one line is appended to the CSV at a time
KVANT_BITS = r"KV cache .+: ([\d.]+) bits per number"


class LogError(Exception):
    """A program failed, or a number is missing in its log."""


def last_number(pattern, text, what):
    found = re.findall(pattern, text)
    if not found:
        raise LogError(f"the log has no {what}")
    return float(found[-1][-1] if isinstance(found[-1], tuple) else found[-1])


def cache_mib(text):
    """Memory of all caches of the context. A program may make a context to measure it first: the
    lines of the last one count, and each of its lines is printed once."""
    begin = max(text.rfind("constructing llama_context"), text.rfind("llama_new_context"), 0)
    sizes = [float(size) for size in re.findall(CACHE_MIB, text[begin:])]
    if not sizes:
        raise LogError("the log has no size of the cache")
    return sum(sizes)


def bits(system, text, f16_mib):
    """Bits per number, with exact tokens, scales, padding and what the cache learns."""
    if system.program == "kvant":
        return last_number(KVANT_BITS, text, "line about kvant's cache")
    return round(16 * cache_mib(text) / f16_mib, 2)


def parse(system, text, f16_mib):
    row = {name: last_number(pattern, text, name) for name, pattern in FOUND.items()}
    row["top1"] = round(row["top1"] / 100, 6)
    return {"bits": bits(system, text, f16_mib), **row}


def ran_on_gpu(text):
    """Whether kvant's device computed on a GPU, by kvant's log."""
    return re.search(GPU_GRAPHS, text) is not None


class Run:
    """The measurements of one model at one length. The f16 logits of each program are in a file
    while its caches are measured."""

    def __init__(self, options, model, length):
        self.options, self.model, self.length = options, model, length
        self.name = model_name(model)

    def on_gpu(self, system):
        """Whether the system is measured on a GPU."""
        host = HOSTS.get(system.program, system.program)
        return needs_gpu(system) or bool(self.options.cuda and host == "llama.cpp")

    def version(self, system):
        host = HOSTS.get(system.program, system.program)
        return CUDA_VERSION if self.options.cuda and host == "llama.cpp" else version(host)

    def folder(self, system):
        host = HOSTS.get(system.program, system.program)
        if self.options.cuda and host == "llama.cpp":
            return self.options.cuda
        return folder(system.program, self.options.work, self.options.jobs)

    def key(self, system):
        return {
            "program": system.program,
            "version": self.version(system),
            "cache": system.cache,
            "model": self.name,
            "text": self.options.text.name,
            "length": str(self.length),
            "chunks": str(self.options.chunks),
        }

    def is_done(self, system):
        path, key = self.options.output, self.key(system)
        return path.exists() and any(
            all(row.get(name) == value for name, value in key.items()) for row in read_rows(path)
        )

    def call(self, system, *words, processes=1):
        """Runs llama-perplexity with the threads of some processes, and returns its words and its
        log."""
        options = self.options
        binary = self.folder(system) / "llama-perplexity"
        count = options.threads * processes
        threads = ["-t", count, "-tb", count]
        command = [
            *start(system, binary, options.kvant),
            *("-m", self.model, "-f", options.text, "-c", self.length, "-b", 512, "-ub", 512),
            *("--chunks", options.chunks, "-fa", "on", *threads, *words),
            *LOUD.get(HOSTS.get(system.program, system.program), ()),
            *QUIRKS.get((system.program, self.name), ()),
            # Nothing is timed here, and a warm-up needs kernels that a lean build may lack.
            *(("-ngl", 99, "--no-warmup") if self.on_gpu(system) else ()),
        ]
        command = [str(word) for word in command]
        # ik_llama.cpp writes a log into the current folder.
        done = subprocess.run(
            command,
            cwd=options.work,
            env={**os.environ, **KVANT},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        text = done.stdout.decode("utf-8", "replace")
        name = f"{system.program}-{system.cache}-{self.name}-{self.length}.log"
        name = name.replace(" ", "_").replace("/", "_")
        (options.work / name).write_text(text)
        if done.returncode != 0:
            raise LogError(f"exit status {done.returncode}; {name} says why")
        return command, text

    def base(self, program, systems):
        """The file of f16's logits of a program, and the memory of its f16 cache."""
        path = self.options.work / f"{program}-{self.name}-{self.length}.logits"
        f16 = next(s for s in systems if s.program == program and s.cache == "f16")
        _, text = self.call(f16, "--kl-divergence-base", path, processes=self.options.parallel)
        return path, cache_mib(text)

    def measure(self, system, base):
        path, f16_mib = base
        words, text = self.call(system, "--kl-divergence-base", path, "--kl-divergence")
        if self.on_gpu(system) and system.program == "kvant" and not ran_on_gpu(text):
            raise LogError("kvant's cache was not on the GPU")
        numbers = parse(system, text, f16_mib)
        scored = {"from": self.length // 2, "to": self.length - 2}
        row = {**self.key(system), **scored, **numbers, **context(words)}
        if self.on_gpu(system):
            row["machine"] = first_line(*GPU_NAME)
        with WRITING:
            append(self.options.output, [{name: str(value) for name, value in row.items()}])
        print(f"{self.name} {self.length} {system.program} {system.cache}: {numbers}", flush=True)

    def all(self, chosen, systems):
        """Measures what the CSV lacks and the programs of --again, a program at a time."""
        again = self.options.again.split()
        waiting = [
            s for s in chosen if s.cache != "f16" and (s.program in again or not self.is_done(s))
        ]
        for program in dict.fromkeys(HOSTS.get(s.program, s.program) for s in waiting):
            base = None
            try:
                base = self.base(program, systems)
                ours = [s for s in waiting if HOSTS.get(s.program, s.program) == program]
                with ThreadPoolExecutor(self.options.parallel) as pool:
                    list(pool.map(lambda system: self.try_system(system, base), ours))
            except LogError as error:
                print(f"{self.name} {self.length} {program} f16: {error}", flush=True)
            finally:
                if base:
                    base[0].unlink()

    def try_system(self, system, base):
        try:
            self.measure(system, base)
        except LogError as error:
            print(f"{self.name} {system.program} {system.cache}: {error}", flush=True)
