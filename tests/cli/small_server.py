"""A small llama-server for launchers, where llama.cpp's is not built: it lists devices, and it
answers /health and /completion.

    small_server.py FOLDER --list-devices
    small_server.py FOLDER --model FILE --port N --flash-attn on|off|auto [--device NAMES] [MORE]

It reads the same variables as llama-server. Flags stand above variables."""

import argparse
import ctypes
import http.server
import json
import os
import sys

from binding import Library

GPU = 1  # GGML_BACKEND_DEVICE_TYPE_GPU


def gpus(library):
    """Names and pointers of the devices that llama-server would list."""
    ggml, base = library.ggml, library.base
    ggml.ggml_backend_dev_count.restype = ctypes.c_size_t
    ggml.ggml_backend_dev_get.restype = ctypes.c_void_p
    base.ggml_backend_dev_name.restype = ctypes.c_char_p
    found = {}
    for i in range(ggml.ggml_backend_dev_count()):
        device = ggml.ggml_backend_dev_get(ctypes.c_size_t(i))
        if base.ggml_backend_dev_type(ctypes.c_void_p(device)) == GPU:
            found[base.ggml_backend_dev_name(ctypes.c_void_p(device)).decode()] = device
    return found


def handler(library, model, context):
    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self, given):
            data = json.dumps(given).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self):
            self.answer({"status": "ok"})

        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            prompt, n = asked["prompt"].encode(), asked["n_predict"]
            self.answer({"content": library.complete(model, context, prompt, n)})

        def log_message(self, *_):
            pass

    return Handler


def main():
    library = Library(sys.argv[1])
    library.load_back_ends()
    devices = gpus(library)
    if "--list-devices" in sys.argv:
        print("Available devices:")
        for name in devices:
            print(f"  {name}: a device (1000 MiB, 1000 MiB free)")
        return
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    variable = os.environ.get("LLAMA_ARG_FLASH_ATTN", "auto")
    parser.add_argument("-fa", "--flash-attn", choices=["on", "off", "auto"], default=variable)
    parser.add_argument("--device", default=os.environ.get("LLAMA_ARG_DEVICE"))
    options, _ = parser.parse_known_args(sys.argv[2:])
    layers = os.environ.get("LLAMA_ARG_N_GPU_LAYERS")
    model = library.load_model(
        options.model,
        [devices[name] for name in options.device.split(",")] if options.device else None,
        int(layers) if layers else None,
    )
    context = library.make_context(model, options.flash_attn) if model else None
    if not context:
        sys.exit(1)
    address = "127.0.0.1", options.port
    http.server.HTTPServer(address, handler(library, model, context)).serve_forever()


if __name__ == "__main__":
    main()
