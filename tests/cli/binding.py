"""A program that calls llama.cpp's libraries from Python, as bindings do.

    binding.py FOLDER MODEL [--load] [--no-device] [--layers N] [--flash-attn on|off|auto]
               [--no-context] [--seconds N]

Prints what follows "The capital of France is". --load loads back ends from files. Bindings that
have them linked in leave that out. Ends with 3 without a context and with 4 without a model."""

import argparse
import ctypes
import pathlib
import re
import struct
import sys
import time

PROMPT = b"The capital of France is"
# More than llama.cpp's structures of parameters have; only places that no version moved are used.
Params = ctypes.c_char * 512
DEVICES, N_GPU_LAYERS, N_CTX = 0, 16, 0


class Batch(ctypes.Structure):
    _fields_ = [("n_tokens", ctypes.c_int32)] + [
        (name, ctypes.c_void_p) for name in ("token", "embd", "pos", "n_seq_id", "seq_id", "logits")
    ]


class Blob(ctypes.Structure):
    _fields_ = [("bytes", Params)]

    def set(self, place, form, value):
        struct.pack_into(form, memoryview(self).cast("B"), place, value)

    def flash_attention(self, value):
        """Flash attention is the last of four settings that are -1 by default."""
        place = bytes(memoryview(self).cast("B")).index(16 * b"\xff") + 12
        self.set(place, "<i", value)


class Library:
    def __init__(self, folder):
        def opened(name):
            form = re.compile(rf"lib{name}(\.[vb][0-9.]+)?\.so[0-9.]*")
            found = [file for file in pathlib.Path(folder).iterdir() if form.fullmatch(file.name)]
            return ctypes.CDLL(str(min(found)), mode=ctypes.RTLD_GLOBAL)

        self.folder = str(folder).encode()
        self.base, self.ggml, self.llama = opened("ggml-base"), opened("ggml"), opened("llama")

    def call(self, name, result, *arguments):
        function = getattr(self.llama, name)
        function.restype = result
        return function(*arguments)


def tokens_of(library, vocab):
    tokens = (ctypes.c_int32 * 64)()
    n = library.call(
        "llama_tokenize", ctypes.c_int32, vocab, PROMPT, len(PROMPT), tokens, 64, True, True
    )
    return list(tokens[:n])


def complete(library, model, context, n_words=4):
    vocab = ctypes.c_void_p(library.call("llama_model_get_vocab", ctypes.c_void_p, model))
    n_vocab = library.call("llama_vocab_n_tokens", ctypes.c_int32, vocab)
    tokens, text = tokens_of(library, vocab), b""
    for _ in range(n_words):
        batch = (ctypes.c_int32 * len(tokens))(*tokens)
        given = library.call("llama_batch_get_one", Batch, batch, len(tokens))
        if library.call("llama_decode", ctypes.c_int32, context, given) != 0:
            sys.exit("decoding fails")
        logits = library.call("llama_get_logits_ith", ctypes.POINTER(ctypes.c_float), context, -1)
        values = logits[:n_vocab]
        tokens = [values.index(max(values))]
        piece = ctypes.create_string_buffer(64)
        n = library.call(
            "llama_token_to_piece", ctypes.c_int32, vocab, tokens[0], piece, 64, 0, False
        )
        text += piece.raw[:n]
    return text.decode()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("model")
    parser.add_argument("--load", action="store_true")
    parser.add_argument("--no-device", action="store_true")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--flash-attn", choices=["on", "off", "auto"], default="auto")
    parser.add_argument("--no-context", action="store_true")
    parser.add_argument("--seconds", type=float, default=0)
    options = parser.parse_args()
    library = Library(options.folder)
    quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
    library.llama.llama_log_set(quiet, None)
    if options.load:
        library.ggml.ggml_backend_load_all_from_path(library.folder)
    params = library.call("llama_model_default_params", Blob)
    none = (ctypes.c_void_p * 1)()
    if options.no_device:
        params.set(DEVICES, "<Q", ctypes.addressof(none))
    if options.layers is not None:
        params.set(N_GPU_LAYERS, "<i", options.layers)
    model = ctypes.c_void_p(
        library.call("llama_model_load_from_file", ctypes.c_void_p, options.model.encode(), params)
    )
    time.sleep(options.seconds)
    if not model:
        sys.exit(4)
    if options.no_context:
        sys.exit(0)
    params = library.call("llama_context_default_params", Blob)
    params.set(N_CTX, "<I", 512)
    params.flash_attention({"on": 1, "off": 0, "auto": -1}[options.flash_attn])
    context = ctypes.c_void_p(
        library.call("llama_init_from_model", ctypes.c_void_p, model, params)
    )
    if not context:
        sys.exit(3)
    library.llama.llama_set_n_threads(context, 1, 1)
    print(complete(library, model, context))


if __name__ == "__main__":
    main()
