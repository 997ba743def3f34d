#!/usr/bin/env python3
"""Records what a stock llama.cpp does with its cells, one trace per workload, for replay.py.

    bench/traces/workloads.py BIN PLUGIN MODEL DRAFT GEMMA TEXT OUT [WORKLOAD...]

BIN is a folder with stock llama-server and llama-perplexity, PLUGIN is libggml-kvant.so. MODEL,
DRAFT and GEMMA are GGUF files; DRAFT has MODEL's vocabulary, and GEMMA has sliding windows. TEXT is
a text of 400 KB or more. OUT gets WORKLOAD.trace. The cells do not depend on what a model answers,
so a model of a few layers does (tests/small_model.py); only the accepted tokens of a draft do.
"""

import concurrent.futures
import os
import pathlib
import random
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from llama_server import Server  # noqa: E402


class Setting:
    """The programs and files of the command line."""

    def __init__(self, bin_dir, plugin, model, draft, gemma, text, out):
        self.bin, self.out = pathlib.Path(bin_dir), pathlib.Path(out)
        self.plugin, self.text = plugin, text
        self.model, self.draft, self.gemma = model, draft, gemma

    def environment(self, name):
        trace = self.out / f"{name}.trace"
        trace.unlink(missing_ok=True)
        clean = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("KVANT", "GGML", "LLAMA_"))
        }
        return clean | {
            "LD_LIBRARY_PATH": str(self.bin),
            "GGML_BACKEND_PATH": self.plugin,
            "KVANT_PRESET": "balanced",
            "KVANT_TRACE": str(trace),
        }


class Users:
    """People who talk to a server; each has a history of tokens."""

    def __init__(self, server, setting, seed=1):
        self.server, self.random, self.history = server, random.Random(seed), {}
        text = pathlib.Path(setting.text).read_text(encoding="utf-8", errors="replace")[:400000]
        status, reply = server.request("POST", "/tokenize", {"content": text})
        assert status == 200, reply
        self.tokens = reply["tokens"]

    def piece(self, n):
        first = self.random.randrange(len(self.tokens) - n)
        return self.tokens[first : first + n]

    def complete(self, prompt, n_predict, **more):
        body = {
            "prompt": prompt,
            "n_predict": n_predict,
            "temperature": 0,
            "ignore_eos": True,
            "return_tokens": True,
        } | more
        status, reply = self.server.request("POST", "/completion", body)
        if status != 200:
            raise RuntimeError(f"status {status}: {reply}")
        return reply["tokens"]

    def say(self, user, n_prompt, n_predict, **more):
        """The user's next message and its answer."""
        history = self.history.setdefault(user, [])
        history += self.piece(n_prompt)
        history += self.complete(history, n_predict, **more)

    def forget(self, user):
        self.history[user] = []


def serve(setting, name, model, flags, talk):
    command = [
        str(setting.bin / "llama-server"),
        "-m",
        model,
        *"--device KVANT -ngl 99 -fa on -t 2 --no-webui".split(),
        *flags,
    ]
    with tempfile.TemporaryFile("w+") as log:
        try:
            with Server(command, log, setting.environment(name)) as server:
                server.wait()
                talk(Users(server, setting))
        except Exception:
            log.seek(0)
            print(log.read()[-3000:], file=sys.stderr)
            raise


def in_turn(users):
    """Three people, one after another; each begins a second conversation after the first one."""
    for _ in range(2):
        for user in "abc":
            users.forget(user)
        for i in range(6):
            for user, n in (("a", 160), ("b", 60), ("c", 300 if i == 0 else 20)):
                users.say(user, n, 60)


def at_once(users, n_users=4, rounds=5, most_prompt=250):
    """Several people at the same time, with messages of different lengths."""

    def talk(i):
        for _ in range(rounds):
            users.say(i, 20 + users.random.randrange(most_prompt), 30 + 10 * i)

    with concurrent.futures.ThreadPoolExecutor(n_users) as pool:
        list(pool.map(talk, range(n_users)))


def churn(users, most_prompt=300):
    """Four requests at any time, of people who come, talk for two rounds and leave."""
    lengths = [
        (50 + users.random.randrange(most_prompt - 50), 20 + users.random.randrange(60))
        for _ in range(24)
    ]

    def talk(i):
        for _ in range(2):
            users.say(i, *lengths[i])

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(talk, range(len(lengths))))


def peak(users):
    """An hour with many tokens, then the usual load."""
    at_once(users, 4, 4, 500)
    users.history.clear()
    churn(users)


def one_long(users):
    """A conversation up to most of the context, then short ones, then one of half the context."""
    for _ in range(14):
        users.say("a", 350, 120)
    for i in range(6):
        users.forget("a")
        for _ in range(3):
            users.say("a", 100 + 40 * i, 60)
    users.forget("a")
    for _ in range(8):
        users.say("a", 400, 100)


def uneven(users):
    """Eight people who fill their slots unevenly, three at a time."""

    def talk(i):
        for _ in range(1 + i):
            users.say(i, 40 + 20 * i, 20 + 5 * i)

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        list(pool.map(talk, range(8)))


def reuse(users):
    """A conversation whose second message is removed twice, as a client does that drops history."""
    for _ in range(2):
        users.forget("a")
        parts = [users.piece(n) for n in (200, 500, 400, 300)]
        for drop in range(3):
            prompt = sum(parts, [])
            parts.append(users.complete(prompt, 100, n_cache_reuse=32))
            if drop < 2:
                del parts[1]
            parts.append(users.piece(60))


def saved(users):
    """Slots that the server idles, saves to files and restores."""
    for round_number in range(3):
        for user in "ab":
            users.say(user, 200 + 100 * round_number, 60, id_slot="ab".index(user))
        for action in ("save", "erase", "restore"):
            for slot in range(2):
                status, reply = users.server.request(
                    "POST", f"/slots/{slot}?action={action}", {"filename": f"slot{slot}.bin"}
                )
                assert status == 200, reply


def two_in_turn(users):
    for _ in range(8):
        users.say("a", 200, 60)
        users.say("b", 80, 40)


def shifted(users):
    """Answers that are longer than the context: llama.cpp drops the older half and shifts keys."""
    users.complete(users.piece(100), 2600)


def perplexity(setting, name, flags):
    command = [
        str(setting.bin / "llama-perplexity"),
        "-m",
        setting.model,
        *"--device KVANT -ngl 99 -fa on -t 2 -f".split(),
        setting.text,
        *flags,
    ]
    subprocess.run(
        command,
        env=setting.environment(name),
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def workloads(setting):
    """Name -> function that records it."""

    def server(name, talk, *flags, model=setting.model):
        return lambda: serve(setting, name, model, flags, talk)

    made = {
        "auto4_in_turn": ("-c", "8192", in_turn),
        "auto4_in_turn_kept": ("-c", "8192", "--no-cache-idle-slots", in_turn),
        "auto4_at_once": ("-c", "8192", at_once),
        "auto4_at_once_small": ("-c", "8192", lambda users: at_once(users, 4, 3, 60)),
        "auto4_tiny": ("-c", "1024", lambda users: at_once(users, 3, 2, 60)),
        "auto4_churn": ("-c", "8192", churn),
        "auto4_heavy": ("-c", "8192", lambda users: churn(users, 900)),
        "auto4_peak": ("-c", "8192", peak),
        "np4_churn": ("-c", "8192", "-np", "4", churn),
        "one_long": ("-c", "8192", "-np", "1", one_long),
        "np8_uneven": ("-c", "16384", "-np", "8", uneven),
        "np8_unified": ("-c", "16384", "-np", "8", "--kv-unified", uneven),
        "reuse": ("-c", "8192", "-np", "1", "--cache-reuse", "32", reuse),
        "reuse_tight": ("-c", "3072", "-np", "1", "--cache-reuse", "32", reuse),
        "draft": (
            "-c",
            "8192",
            "-np",
            "1",
            "-md",
            setting.draft,
            "-ngld",
            "99",
            "--spec-type",
            "draft-simple",
            "--spec-draft-n-max",
            "8",
            "--device-draft",
            "KVANT",
            "--spec-synth-len",
            "4",
            two_in_turn,
        ),
        "saved_slots": ("-c", "8192", "-np", "2", "--slot-save-path", tempfile.gettempdir(), saved),
        "shifted": ("-c", "2048", "-np", "1", "--context-shift", shifted),
    }
    found = {name: server(name, flags[-1], *flags[:-1]) for name, flags in made.items()}
    found["gemma_windows"] = server("gemma_windows", two_in_turn, "-c", "8192", model=setting.gemma)
    found["perplexity_4"] = lambda: perplexity(
        setting, "perplexity_4", ("-c", "512", "-b", "2048", "--chunks", "12")
    )
    return found


def main():
    if len(sys.argv) < 8:
        sys.exit(__doc__)
    setting = Setting(*sys.argv[1:8])
    setting.out.mkdir(parents=True, exist_ok=True)
    known = workloads(setting)
    for name in sys.argv[8:] or known:
        print(name, flush=True)
        known[name]()


if __name__ == "__main__":
    main()
