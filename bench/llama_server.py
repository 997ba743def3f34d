"""A llama-server as a context: on a free port, stopped at the end."""

import http.client
import json
import socket
import subprocess
import time


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
