#!/usr/bin/env python3
"""Measures whether a model still does tasks when its cache is compressed. llama-server reads a long
prompt once, and then answers questions about it greedily.

    bench/tasks.py -m model.gguf -f wiki.test.raw --server llama-server --tasks "needle:16384"

The tasks are: `needle`, numbers that stand between the lines of the text; `tools`, calls of tools
whose JSON schemas stand before the text, with a grammar of the schemas; `arithmetic`, word problems
of two steps after worked examples. The number after a task is the length of the prompt in tokens.

A line of bench/results/tasks.csv is a task with a cache. `right` counts expected answers.
`equal` counts answers that f16, which is measured first, gives too. The intervals are Wilson's,
of 95 %. The prompts have the form of Qwen's chats. `arithmetic` has worked examples instead of a
text."""

import concurrent.futures
import json
import os
import pathlib
import random
import re
import sys
import tempfile

from llama_server import Server, parser_of_caches, with_cache
from record import append, context, first_line, model_name

SEED = 0
GPU_NAME = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
# On a GPU kvant would leave the cache as f16 while memory suffices.
EXACT = {**os.environ, "KVANT_EXACT": "0"}
LEFT = 256  # tokens of the length that are left for a question and its answer
ADJECTIVES = "amber copper silver quiet golden velvet frozen hollow crimson gentle".split()
NOUNS = "harbour lantern orchard meadow compass canyon anchor thunder ladder glacier".split()
PEOPLE = "Amina Jonas Mei Pavel Elif Tomas Ada Ravi Nora Kofi".split()
THINGS = "pencils apples stamps marbles tickets cards shells coins beads stickers".split()
FEW, MANY = 3, 12  # numbers that the word problems multiply
BEGIN_TOOLS = (
    "You answer by calling one tool. Write one JSON object with the keys name and arguments, and "
    "nothing else. These are the tools:\n"
)
AFTER_TOOLS = "\nThe following text has nothing to do with the questions.\n"


def chat(system, user, begin=""):
    """A prompt for the server: the part that all questions share, and the part of one question."""
    head = f"<|im_start|>system\n{system}<|im_end|>\n"
    return head + f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n{begin}"


def fitting(count, text, length):
    """The longest beginning of the text, up to some characters, that has at most length tokens."""
    size = min(len(text), 8 * max(length, 0))
    while size > 0 and (tokens := count(text[:size])) > length:
        size = min(size - 1, int(size * length / tokens))
    return text[:size]


class Needles:
    """Facts between the lines of a text. Each question asks for one of them."""

    words, grammar = 16, None

    def __init__(self, options):
        draw = random.Random(SEED)
        pairs = [f"{a} {b}" for a in ADJECTIVES for b in NOUNS]
        keys = draw.sample(pairs, options.questions)
        self.facts = {key: str(draw.randint(10000, 99999)) for key in keys}
        self.text = options.text.read_text()

    def prompt(self, count, length):
        said = [f"The special magic value of {key} is {n}.\n" for key, n in self.facts.items()]
        room = length - LEFT - count("".join(said))
        lines = fitting(count, self.text, room).splitlines(keepends=True)
        for i, fact in enumerate(said):
            lines.insert((2 * i + 1) * len(lines) // (2 * len(said)), fact)
        return "You answer questions about this text.\n" + "".join(lines)

    def questions(self):
        for key, number in self.facts.items():
            yield f"What is the special magic value of {key}?", number

    @staticmethod
    def begin(question):
        return "The special magic value of " + question.split(" of ")[1].rstrip("?") + " is"

    @staticmethod
    def read(answer):
        found = re.search(r"\d+", answer)
        return found and found.group()


class Tools:
    """Schemas of tools, then a text. Each question wants one call."""

    words = 128

    def __init__(self, options):
        self.tools = json.loads(pathlib.Path(__file__).with_name("tools.json").read_text())
        self.text, self.n = options.text.read_text(), options.questions
        calls = [
            self.object({"name": {"const": tool["name"]}, "arguments": self.arguments(tool)})
            for tool in self.tools
        ]
        self.grammar = {"anyOf": calls}

    @staticmethod
    def object(properties):
        made = {"type": "object", "properties": properties, "required": list(properties)}
        return made | {"additionalProperties": False}

    def arguments(self, tool):
        given = tool["arguments"].items()
        return self.object(
            {key: {"type": a["type"], "description": a["description"]} for key, a in given}
        )

    def prompt(self, count, length):
        schemas = "\n".join(
            json.dumps(
                {
                    "name": tool["name"],
                    "description": tool["description"],
                    "parameters": self.arguments(tool),
                }
            )
            for tool in self.tools
        )
        head = BEGIN_TOOLS + schemas + AFTER_TOOLS
        return head + fitting(count, self.text, length - LEFT - count(head))

    def questions(self):
        draw = random.Random(SEED)
        for number in range(self.n):
            tool = self.tools[number % len(self.tools)]
            given = tool["arguments"].items()
            chosen = {key: draw.choice(argument["choices"]) for key, argument in given}
            yield tool["question"].format(**chosen), {"name": tool["name"], "arguments": chosen}

    @staticmethod
    def begin(_):
        return ""

    @staticmethod
    def read(answer):
        try:
            return json.loads(answer)
        except ValueError:
            return None


class Arithmetic:
    """Word problems of two steps. The prompt has worked ones."""

    words, grammar = 96, None

    def __init__(self, options):
        self.n = options.questions

    @staticmethod
    def problem(draw):
        """A problem, its steps and its result."""
        who, other = draw.sample(PEOPLE, 2)
        what, boxes, each = draw.choice(THINGS), draw.randint(FEW, MANY), draw.randint(FEW, MANY)
        some, whole = draw.randint(FEW, boxes * each - 1), boxes * each
        told = f"{who} has {boxes} boxes with {each} {what} in each. "
        if draw.random() < 0.5:
            told += f"{who} gives {some} of them to {other}. How many {what} are left?"
            steps = f"{boxes} * {each} = {whole}. {whole} - {some} = {whole - some}."
            return told, steps, whole - some
        told += f"{other} brings {some} more. How many {what} are there now?"
        steps = f"{boxes} * {each} = {whole}. {whole} + {some} = {whole + some}."
        return told, steps, whole + some

    def prompt(self, count, length):
        draw, text = random.Random(SEED), "You solve word problems. These are examples.\n"
        while True:
            told, steps, result = self.problem(draw)
            more = text + f"\nQuestion: {told}\nAnswer: {steps} The answer is {result}.\n"
            if count(more) > length - LEFT:
                return text
            text = more

    def questions(self):
        draw = random.Random(SEED + 1)
        for _ in range(self.n):
            told, _, result = self.problem(draw)
            yield f"Question: {told}", str(result)

    @staticmethod
    def begin(_):
        return "Answer:"

    @staticmethod
    def read(answer):
        found = re.search(r"answer is (-?\d+)", answer)
        return found and found.group(1)


TASKS = {"needle": Needles, "tools": Tools, "arithmetic": Arithmetic}


def wilson(count, total, z=1.96):
    """Bounds of a share of which count of total was seen."""
    share, square = count / total, z * z / total
    middle = (share + square / 2) / (1 + square)
    half = z / (1 + square) * (share * (1 - share) / total + square / total / 4) ** 0.5
    return max(middle - half, 0), min(middle + half, 1)


def start(options, cache, length):
    """The words that start llama-server with a cache."""
    words = [options.server, "-m", options.model, "-c", length, "-np", 1, "-t", options.threads]
    words += ["--no-warmup", "-fa", "on", *(["-ngl", 99] if options.gpu else [])]
    return [str(word) for word in with_cache(options.kvant, cache, words)]


def post(server, path, body):
    status, reply = server.request("POST", path, body)
    if status != 200:
        raise RuntimeError(f"{path}: status {status}: {reply}")
    return reply


def ask(options, cache, task, length):
    """The answers of a cache, and the number of tokens of the shared prompt."""

    def count(text):
        return len(post(server, "/tokenize", {"content": text})["tokens"])

    answers = []
    path = options.logs / f"{task_name(task)}-{length}-{cache.replace(':', '-')}.log"
    with open(path, "wb") as log, Server(start(options, cache, length), log, EXACT) as server:
        server.wait()
        system = task.prompt(count, length)
        for question, _ in task.questions():
            body = {"prompt": chat(system, question, task.begin(question)), "temperature": 0}
            body |= {"n_predict": task.words, "cache_prompt": True, "stop": ["<|im_end|>"]}
            if task.grammar:
                body["json_schema"] = task.grammar
            answers.append(post(server, "/completion", body)["content"])
        tokens = count(chat(system, ""))
    return answers, tokens


def task_name(task):
    return next(name for name, kind in TASKS.items() if isinstance(task, kind))


def line(options, cache, task, tokens, answers, exact):
    read = [task.read(answer) for answer in answers]
    expected = [wanted for _, wanted in task.questions()]
    base = [task.read(answer) for answer in exact]
    counts = {
        "valid": sum(answer is not None for answer in read),
        "right": sum(answer == wanted for answer, wanted in zip(read, expected)),
        "equal": sum(ours is not None and ours == theirs for ours, theirs in zip(read, base)),
    }
    found = {}
    for name, number in counts.items():
        low, high = wilson(number, len(read))
        found |= {name: number, f"{name}_low": f"{low:.3f}", f"{name}_high": f"{high:.3f}"}
    machine = {"machine": first_line(*GPU_NAME)} if options.gpu else {}
    command = ["bench/tasks.py", "-m", str(options.model), "-f", str(options.text)]
    return {
        "model": model_name(options.model),
        "task": task_name(task),
        "tokens": tokens,
        "cache": cache,
        "questions": len(read),
        **found,
        "seed": SEED,
        **context([*command, "--questions", str(options.questions), "--caches", cache]),
        **machine,
    }


def parse_arguments():
    parser = parser_of_caches(
        __doc__,
        "q8_0,q4_0,kvant:quality,kvant:balanced,kvant:small,kvant:tiny",
        "tasks.csv",
    )
    parser.add_argument("--server", default="llama-server", help="llama.cpp's llama-server")
    parser.add_argument("--gpu", action="store_true", help="the server is on a GPU")
    parser.add_argument("--tasks", default="needle:16384 tools:8192 tools:32768 arithmetic:2048")
    parser.add_argument("--questions", type=int, default=40)
    parser.add_argument("--parallel", type=int, default=1, help="caches at a time (default 1)")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--logs", type=pathlib.Path, help="folder (default: a temporary one)")
    options = parser.parse_args()
    options.logs = options.logs or pathlib.Path(tempfile.mkdtemp(prefix="kvant-tasks-"))
    return options


def measure(options, task, length):
    """Asks the caches, f16 first, and returns the caches that failed."""
    failed = []

    def save(cache, answers, tokens):
        found = line(options, cache, task, tokens, answers, exact)
        append(options.output, [{name: str(value) for name, value in found.items()}])
        print(found, *answers[:4], sep="\n", flush=True)

    exact, tokens = ask(options, "f16", task, length)
    save("f16", exact, tokens)
    caches = [cache for cache in dict.fromkeys(options.caches.split(",")) if cache != "f16"]
    with concurrent.futures.ThreadPoolExecutor(options.parallel) as pool:
        asked = {pool.submit(ask, options, cache, task, length): cache for cache in caches}
        for done in concurrent.futures.as_completed(asked):
            if error := done.exception():
                print(f"tasks: {asked[done]}: {error}", file=sys.stderr)
                failed.append(asked[done])
            else:
                save(asked[done], *done.result())
    return failed


def main():
    options, failed = parse_arguments(), []
    for name, length in (word.split(":") for word in options.tasks.split()):
        failed += measure(options, TASKS[name](options), int(length))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
