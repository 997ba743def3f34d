#!/usr/bin/env python3
"""Measures what compressed caches do to a model that reads its own answers. With each cache,
llama.cpp's llama-completion generates greedy answers to prompts. Then the f16 cache scores every
answer. The compressed cache reads the same answer again, which gives its divergence by position.

    bench/generate.py -m model.gguf -f wiki.test.raw --caches f16,q4_0,kvant:balanced

A prompt is the beginning of one of N equal parts of the text. A line of bench/results/generate.csv
is a cache. Its intervals are bootstrapped over prompts. An answer loops when its last LOOP
characters occur at least three times in it. Small models loop with an f16 cache, too, so the line
of f16 is the reference."""

import array
import concurrent.futures
import json
import math
import pathlib
import random
import subprocess
import sys
import tempfile

from llama_server import Server, parser_of_caches, with_cache
from record import append, context, model_name

PROMPT = 80  # tokens that are not scored: a prompt has fewer
LOOP = 64
RESAMPLES, SEED = 2000, 0


def prompts(text, count, characters=260):
    """Beginnings of equal parts of the text, each from a line's start and cut behind a word."""
    found = []
    for part in range(count):
        begin = text.index("\n", part * len(text) // count) + 1
        piece = text[begin:].lstrip()[:characters]
        found.append(piece[: piece.rindex(" ")])
    return found


def start(options, cache):
    """The words that start llama-completion with a cache."""
    binary = options.programs / "llama-completion"
    kind, _, preset = cache.rpartition(":")
    if kind == "kvant":
        return [options.kvant, "exec", "--preset", preset, "--quiet", "--", binary]
    return [binary, "-ctk", cache, "-ctv", cache, "-fa", "on"]


def generate(options, cache, prompt):
    """The prompt and its answer."""
    words = [
        *start(options, cache),
        *("-m", options.model, "-p", prompt, "-n", options.tokens, "-c", 2 * options.tokens),
        *("--temp", 0, "--ignore-eos", "-no-cnv", "-t", options.threads),
        *("--no-display-prompt", "--no-warmup"),
    ]
    done = subprocess.run([str(word) for word in words], capture_output=True)
    if done.returncode != 0:
        sys.exit(f"generate: {cache}: {done.stderr.decode('utf-8', 'replace')[-500:]}")
    return prompt + done.stdout.decode("utf-8", "replace").removesuffix("\n\n")


def read_tensors(path):
    """{name: list of numbers} of a safetensors file of floats."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    found = {}
    for name, what in json.loads(data[8 : 8 + size]).items():
        if name != "__metadata__":
            first, last = what["data_offsets"]
            numbers = array.array({"F32": "f", "F64": "d"}[what["dtype"]])
            numbers.frombytes(data[8 + size + first : 8 + size + last])
            found[name] = list(numbers)
    return found


def score(options, cache, answer):
    """The f16 cache's negative log-likelihoods of an answer, and the cache's divergences."""
    kind, _, preset = cache.rpartition(":")
    which = ["--preset", preset] if kind == "kvant" else ["--stock", cache]
    with tempfile.TemporaryDirectory() as folder:
        file, values = pathlib.Path(folder, "answer.txt"), pathlib.Path(folder, "values")
        # kvant eval wants a text of two contexts and scores the first one here.
        file.write_text(answer + "\n" + options.text.read_text()[: 16 * options.scored])
        words = [options.kvant, "eval", "-m", options.model, "-f", file, "-c", options.scored]
        words += ["--chunks", 1, "--from", PROMPT, "-b", 64, "-t", options.threads]
        words += [*which, "--values", values, "--json"]
        done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"generate: {cache}: {done.stderr[-500:]}")
        found = read_tensors(values)
    return found["nll.0"], found.get("kld.1", found["kld.0"])


def mean(numbers):
    return sum(numbers) / len(numbers)


def interval(numbers):
    """The central 95 % of means of resampled prompts."""
    draw = random.Random(SEED)
    means = sorted(mean(draw.choices(numbers, k=len(numbers))) for _ in range(RESAMPLES))
    return means[RESAMPLES // 40], means[-RESAMPLES // 40 - 1]


def loops(answer):
    return answer.count(answer[-LOOP:]) >= 3


def served(options, cache, begun):
    """The prompts and their answers, from a llama-server that makes all of them at once."""
    words = [options.server, "-m", options.model, "-np", len(begun), "-t", options.threads]
    words += ["-c", 2 * options.tokens * len(begun), "--no-warmup", "-fa", "on"]
    words = [str(word) for word in with_cache(options.kvant, cache, words)]

    def ask(prompt):
        body = {"prompt": prompt, "n_predict": options.tokens, "temperature": 0}
        status, reply = server.request("POST", "/completion", {**body, "ignore_eos": True})
        if status != 200:
            raise RuntimeError(f"status {status}: {reply}")
        return prompt + reply["content"]

    with tempfile.TemporaryFile() as log, Server(words, log) as server:
        server.wait()
        with concurrent.futures.ThreadPoolExecutor(len(begun)) as pool:
            return list(pool.map(ask, begun))


def make_answers(options, cache, begun):
    if options.server:
        return served(options, cache, begun)
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        return list(pool.map(lambda prompt: generate(options, cache, prompt), begun))


def find_answers(options, cache, begun):
    """The answers of a cache, from the folder of answers if they are there."""
    if options.answers is None:
        return make_answers(options, cache, begun)
    path = options.answers / f"{model_name(options.model)}-{cache.replace(':', '-')}.json"
    if not path.exists():
        part = path.with_suffix(".part")
        part.write_text(json.dumps(make_answers(options, cache, begun), indent=1))
        part.rename(path)
    return json.loads(path.read_text())


def line(options, cache, begun):
    """A line of the CSV, or None without scores. Several answers are scored at a time."""
    answers = find_answers(options, cache, begun)
    if options.no_scores:
        return None
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        scores = list(pool.map(lambda answer: score(options, cache, answer), answers))
    nll, kld = zip(*scores)
    logs = [mean(row) for row in nll]
    low, high = interval(logs)
    quarters = [[row[i * len(row) // 4 : (i + 1) * len(row) // 4] for row in kld] for i in range(4)]
    divergences = [mean(row) for row in kld]
    kld_low, kld_high = interval(divergences)
    command = ["bench/generate.py", "-m", str(options.model), "-f", str(options.text)]
    command += ["--prompts", str(len(answers)), "--tokens", str(options.tokens), "--caches", cache]
    numbers = {
        "ppl": math.exp(mean(logs)),
        "ppl_low": math.exp(low),
        "ppl_high": math.exp(high),
        "kld": mean(divergences),
        "kld_low": kld_low,
        "kld_high": kld_high,
        **{f"kld_quarter_{i + 1}": mean(sum(q, [])) for i, q in enumerate(quarters)},
    }
    return {
        "model": model_name(options.model),
        "cache": cache,
        "prompts": len(answers),
        "tokens": options.scored - PROMPT,
        **{name: f"{value:.6g}" for name, value in numbers.items()},
        "loops": sum(map(loops, answers)),
        "seed": SEED,
        **context(command),
    }


def parse_arguments():
    parser = parser_of_caches(
        __doc__,
        "f16,q8_0,q4_0,kvant:quality,kvant:balanced,kvant:small,kvant:tiny",
        "generate.csv",
    )
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=2048, help="that are generated")
    parser.add_argument(
        "--scored", type=int, default=0, help="tokens with the prompt (default: 80 more than 15/16)"
    )
    parser.add_argument("--threads", type=int, default=1, help="of an answer")
    parser.add_argument("--jobs", type=int, default=2, help="answers at a time")
    parser.add_argument("--server", help="a llama-server that makes the answers, instead")
    parser.add_argument(
        "--answers", type=pathlib.Path, help="folder that keeps answers, for a later call to score"
    )
    parser.add_argument("--no-scores", action="store_true", help="make the answers alone")
    parser.add_argument("--programs", type=pathlib.Path, help="folder of scripts/fetch.py programs")
    options = parser.parse_args()
    if not (options.programs or options.server or options.answers):
        parser.error("--programs or --server is missing")
    if options.answers:
        options.answers.mkdir(parents=True, exist_ok=True)
    options.scored = options.scored or PROMPT + options.tokens * 15 // 16
    return options


def main():
    options = parse_arguments()
    begun = prompts(options.text.read_text(), options.prompts)
    for cache in options.caches.split(","):
        found = line(options, cache, begun)
        if found is None:
            continue
        append(options.output, [{name: str(value) for name, value in found.items()}])
        print(found, flush=True)


if __name__ == "__main__":
    main()
