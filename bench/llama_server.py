"""Code for programs that compare caches in llama.cpp. It has their arguments, and the words that
start a program with a cache. It starts a llama-server on a free port and stops it at the end."""

import argparse
import http.client
import json
import pathlib
import socket
import subprocess
import time


ROOT = pathlib.Path(__file__).resolve().parents[1]


def parser_of_caches(description, caches, results):
    """A parser with the arguments that all these programs have. results: the name of their file."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model", type=pathlib.Path, required=True)
    parser.add_argument("-f", "--text", type=pathlib.Path, required=True)
    parser.add_argument("--caches", default=caches)
    parser.add_argument("--kvant", default=ROOT / "build" / "bin" / "kvant")
    parser.add_argument(
        "-o", "--output", type=pathlib.Path, default=ROOT / "bench" / "results" / results
    )
    return parser


def with_cache(kvant, cache, words):
    """The words that start a program of llama.cpp with a cache: a type of llama.cpp, or kvant: and
    a preset."""
    kind, _, preset = cache.rpartition(":")
    if kind == "kvant":
        return [kvant, "exec", "--preset", preset, "--", *words]
    return [*words, "-ctk", cache, "-ctv", cache]


class Server:
    def __init__(self, command, log, env=None):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.process = subprocess.Popen(
            [*command, "--port", str(self.port)], stdout=log, stderr=log, env=env
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def request(self, method, path, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        try:
            connection.request(
                method, path, body and json.dumps(body), {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def wait(self):
        end = time.monotonic() + 120
        while time.monotonic() < end and self.process.poll() is None:
            try:
                if self.request("GET", "/health")[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(0.2)
        raise RuntimeError("llama-server did not start")
