#!/usr/bin/env python3
"""Whether a llama-server keeps its memory constant. Clients send prompts of random words and
lengths until time is up. CSV on stdout: seconds, requests answered, errors, MiB of the server's
resident memory and of the GPU's used memory.

    soak.py SECONDS CLIENTS -- llama-server -m MODEL -np 8 -c 16384 ..."""

import http.client
import pathlib
import random
import subprocess
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from llama_server import Server  # noqa: E402

EVERY = 15  # seconds between rows
WORDS = (
    "river stone seven under the map of light and bread walks slowly to code return north".split()
)


class Clients:
    def __init__(self, server, n):
        self.server, self.done, self.errors, self.last, self.stopped = server, 0, 0, "", False
        self.threads = [
            threading.Thread(target=self.send, args=(i,), daemon=True) for i in range(n)
        ]
        for thread in self.threads:
            thread.start()

    def send(self, seed):
        choose = random.Random(seed)
        while not self.stopped:
            words = choose.choices(WORDS, k=choose.choice((10, 60, 300, 900)))
            body = {
                "prompt": " ".join(words),
                "n_predict": choose.choice((1, 16, 64)),
                "cache_prompt": choose.random() < 0.5,
            }
            try:
                status, said = self.server.request("POST", "/completion", body)
            except (OSError, ValueError, http.client.HTTPException) as error:
                status, said = 0, error
            if status == 200:
                self.done += 1
            else:
                self.errors, self.last = self.errors + 1, f"status {status}: {said}"

    def stop(self):
        self.stopped = True
        for thread in self.threads:
            thread.join()


def resident(pid):
    with open(f"/proc/{pid}/status") as file:
        return next(
            (int(line.split()[1]) // 1024 for line in file if line.startswith("VmRSS")), 0
        )  # 0: it just ended


def gpu():
    ask = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return subprocess.run(ask, capture_output=True, text=True, check=True).stdout.split()[0]


def main():
    if len(sys.argv) < 5 or sys.argv[3] != "--":
        sys.exit(__doc__)
    seconds, n_clients, command = float(sys.argv[1]), int(sys.argv[2]), sys.argv[4:]
    with Server(command, sys.stderr) as server:
        server.wait()
        print("seconds,requests,errors,resident MiB,GPU MiB", flush=True)
        begun, clients, process = time.monotonic(), Clients(server, n_clients), server.process

        def row():
            passed = time.monotonic() - begun
            print(
                f"{passed:.0f},{clients.done},{clients.errors},{resident(process.pid)},{gpu()}",
                flush=True,
            )

        while time.monotonic() - begun < seconds and process.poll() is None:
            row()
            time.sleep(EVERY)
        clients.stop()
        if clients.errors or process.poll() is not None:
            sys.exit(f"soak.py: {clients.errors} errors, the last: {clients.last}")
        row()


if __name__ == "__main__":
    main()
