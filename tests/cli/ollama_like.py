"""Starts a llama-server as Ollama's llm/llama_server.go does (ollama/ollama at 00f6d62): in the
user's environment, first for the list of its devices, then with Ollama's flags.

    ollama_like.py FOLDER MODEL [BACK_END]

FOLDER has llama-server, as Ollama's lib/ollama has. Prints what follows a prompt. With an NVIDIA
GPU, Ollama names its CUDA back end in GGML_BACKEND_PATH; BACK_END is that one. Ollama switches
flash attention off for a device that it does not know, unless OLLAMA_FLASH_ATTENTION says
otherwise."""

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

KNOWN = re.compile(r"(CUDA|ROCm|Vulkan|MTL|Metal)\d*$")
PROMPT = "The capital of France is"
SECONDS = 100  # time limit until a server answers


def flash_attention(server):
    listed = subprocess.run([server, "--list-devices"], capture_output=True, text=True, check=True)
    names = re.findall(r"^  (\S+): .*MiB free\)$", listed.stdout, re.M)
    wanted = os.environ.get("OLLAMA_FLASH_ATTENTION")
    if wanted is not None:
        return "on" if wanted == "1" else "off"
    return "auto" if all(KNOWN.match(name) for name in names) else "off"


def flags(model, port, attention):
    words = f"--model {model} --port {port} --host 127.0.0.1 --no-webui --offline -c 4096 -np 1"
    words += " --log-verbosity 4 --no-log-prefix --no-log-timestamps"
    return f"{words} --flash-attn {attention} -b 512 -ub 512 --context-shift".split()


def ask(port, path, **given):
    data = json.dumps(given).encode() if given else None
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data)
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        return json.load(answer)


def wait_until_ready(server, port):
    for _ in range(10 * SECONDS):
        try:
            return ask(port, "/health")
        except (urllib.error.URLError, ConnectionError):
            if server.poll() is not None:
                sys.exit(f"the server ended with {server.returncode}")
            time.sleep(0.1)
    sys.exit("the server does not answer")


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def complete(port):
    return ask(port, "/completion", prompt=PROMPT, n_predict=4, temperature=0)["content"]


def main():
    folder, model, *back_end = sys.argv[1:]
    if back_end:
        os.environ["GGML_BACKEND_PATH"] = back_end[0]
    program = os.path.join(folder, "llama-server")
    port = free_port()
    words = [program, *flags(model, port, flash_attention(program))]
    server = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        wait_until_ready(server, port)
        print(complete(port))
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
