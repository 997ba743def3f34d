#!/usr/bin/env python3
"""llama-server on the compressed cache: whether a request gets the same answer together with other
requests as alone, compared with the f16 cache.

    server_concurrent.py KVANT LLAMA_SERVER MODEL PLUGIN

It measures a cache per slot and one unified cache, with f16, a codec that learns nothing
(turboquant-4) and the default preset. For each cache, 15 greedy requests run alone, twice. Then
they run twice in another order, four at a time. It prints how many answers of the second pass equal
the first pass, and how many of the 30 later answers equal the second pass. Answers that differ with
f16 are llama.cpp's effect: products over larger batches. Without a calibration the default preset
learns centres and scales from rows, so its answers depend on earlier requests, also alone."""

import concurrent.futures
import os
import random
import sys
import tempfile

from llama_server import Server

N_SLOTS, N_PREDICT, N_PASSES = 4, 24, 2
WARM_UP = (
    "It rained for three days, and on the fourth the river stood in the lower streets. People "
    "carried chairs upstairs. " * 4
)
PROMPTS = [
    "The capital of France is",
    "Write a short list of three fruits:\n1.",
    "def fibonacci(n):\n",
    "Once upon a time there was a small robot who",
    "Question: What is 12 plus 30?\nAnswer:",
    "The for statement is used to iterate over the elements of a sequence. In Python it is",
    "Water boils at 100 degrees Celsius at sea level. On a mountain it boils",
    "Dear Sir or Madam,\n\nI am writing to",
    "A recipe for pancakes needs flour, milk and eggs. First,",
    "The three branches of government in the United States are",
    "In 1969 two people walked on the Moon for the first time. Their names were",
    "SELECT name, age FROM people WHERE",
    "Bees make honey from nectar. They collect it from flowers and",
    "To be, or not to be, that is the question:",
    "The opposite of hot is cold. The opposite of large is small. The opposite of early is",
]


def environment():
    """Without settings of kvant and llama.cpp that the caller happens to have."""
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("KVANT", "GGML", "LLAMA_"))
    }
    return env | {"KVANT_PLUGIN": PLUGIN}


def answer(server, prompt):
    status, reply = server.request(
        "POST",
        "/completion",
        {
            "prompt": prompt,
            "n_predict": N_PREDICT,
            "temperature": 0,
            "cache_prompt": False,
            "ignore_eos": True,
        },
    )
    if status != 200:
        raise RuntimeError(f"status {status}: {reply}")
    return reply["content"]


def equal(these, those):
    return sum(this == that for this, that in zip(these, those))


def among_others(server, number):
    """The answers, in the order of PROMPTS."""
    order = list(range(len(PROMPTS)))
    random.Random(number).shuffle(order)
    with concurrent.futures.ThreadPoolExecutor(N_SLOTS) as pool:
        answers = dict(zip(order, pool.map(lambda i: answer(server, PROMPTS[i]), order)))
    return [answers[i] for i in range(len(PROMPTS))]


def measure(command):
    """How many answers are equal alone, the second time, and among others."""
    with tempfile.TemporaryFile("w+") as log:
        try:
            with Server(command, log, environment()) as server:
                server.wait()
                answer(server, WARM_UP)
                first, alone = ([answer(server, prompt) for prompt in PROMPTS] for _ in range(2))
                return equal(first, alone), sum(
                    equal(among_others(server, i), alone) for i in range(N_PASSES)
                )
        except Exception:
            log.seek(0)
            print(log.read()[-4000:])
            raise


def main():
    global PLUGIN
    kvant, server, model, PLUGIN = sys.argv[1:]
    for kind in ("--no-kv-unified", "--kv-unified"):
        stock = [
            server,
            "-m",
            model,
            "-c",
            "4096",
            "-np",
            str(N_SLOTS),
            *"-t 1 -fa on".split(),
            kind,
        ]
        found = {
            "f16": measure(stock),
            "turboquant-4": measure([kvant, "exec", "-k", "turboquant-4", "--", *stock]),
            "balanced": measure([kvant, "exec", "--preset", "balanced", "--", *stock]),
        }
        for name, (again, among) in found.items():
            print(
                f"{kind} {name}: alone again {again} of {len(PROMPTS)}, among others {among} of "
                f"{N_PASSES * len(PROMPTS)}",
                flush=True,
            )


if __name__ == "__main__":
    main()
