#!/usr/bin/env python3
"""Does a llama-server keep its memory? Clients send prompts of random words and lengths until time is up; rows of CSV on stdout:
seconds, requests answered, errors, MiB of the server's resident memory and of the GPU's used memory.

    soak.py SECONDS CLIENTS -- llama-server -m MODEL -np 8 -c 16384 ...
"""

import http.client
import json
import random
import socket
import subprocess
import sys
import threading
import time

EVERY = 15  # seconds between rows
WORDS = "river stone seven under the map of light and bread walks slowly to code return north".split()


def request(port, path, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST" if body else "GET", path, body and json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read()
        if response.status != 200:
            raise OSError(f"status {response.status}: {text[:200]}")
        return text
    finally:
        connection.close()


class Clients:
    def __init__(self, port, n):
        self.port, self.done, self.errors, self.last, self.stopped = port, 0, 0, "", False
        self.threads = [threading.Thread(target=self.send, args=(i,)) for i in range(n)]
        for thread in self.threads:
            thread.start()

    def send(self, seed):
        choose = random.Random(seed)
        while not self.stopped:
            words = choose.choices(WORDS, k=choose.choice((10, 60, 300, 900)))
            body = {"prompt": " ".join(words), "n_predict": choose.choice((1, 16, 64)), "cache_prompt": choose.random() < 0.5}
            try:
                request(self.port, "/completion", body)
                self.done += 1
            except OSError as error:
                self.errors, self.last = self.errors + 1, str(error)

    def stop(self):
        self.stopped = True
        for thread in self.threads:
            thread.join()


def resident(pid):
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) // 1024 for line in file if line.startswith("VmRSS"))


def gpu():
    ask = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return subprocess.run(ask, capture_output=True, text=True, check=True).stdout.split()[0]


def wait(server, port):
    for _ in range(1200):
        try:
            return request(port, "/health")
        except OSError:
            if server.poll() is not None:
                sys.exit("soak.py: the server ended")
            time.sleep(0.1)
    sys.exit("soak.py: the server did not become ready")


def main():
    if len(sys.argv) < 5 or sys.argv[3] != "--":
        sys.exit(__doc__)
    seconds, n_clients, command = float(sys.argv[1]), int(sys.argv[2]), sys.argv[4:]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=sys.stderr)
    try:
        wait(server, port)
        print("seconds,requests,errors,resident MiB,GPU MiB", flush=True)
        begun, clients = time.monotonic(), Clients(port, n_clients)
        while (now := time.monotonic() - begun) < seconds and server.poll() is None:
            print(f"{now:.0f},{clients.done},{clients.errors},{resident(server.pid)},{gpu()}", flush=True)
            time.sleep(EVERY)
        clients.stop()
        if clients.errors or server.poll() is not None:
            sys.exit(f"soak.py: {clients.errors} errors, the last: {clients.last}")
        print(f"{time.monotonic() - begun:.0f},{clients.done},{clients.errors},{resident(server.pid)},{gpu()}", flush=True)
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    main()
