"""A program that calls llama.cpp's libraries from Python, as bindings do.

    binding.py FOLDER MODEL [--load] [--no-device] [--layers N] [--flash-attn on|off|auto]

Prints what follows "The capital of France is". --load loads back ends from files. Bindings that
have them linked in leave that out. Ends with 3 without a context, with 4 without a model and with 5
when decoding fails."""

import argparse
import ctypes
import pathlib
import re
import struct
import sys

from watched import wait_until_seen

PROMPT = b"The capital of France is"
# Larger than llama.cpp's structures of parameters. The program uses only offsets that no version
# changed.
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
        self.quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(
            lambda *_: None
        )
        self.llama.llama_log_set(self.quiet, None)

    def load_back_ends(self):
        self.ggml.ggml_backend_load_all_from_path(self.folder)

    def call(self, name, result, *arguments):
        function = getattr(self.llama, name)
        function.restype = result
        return function(*arguments)

    def load_model(self, path, devices=None, layers=None):
        """devices: None uses all devices."""
        params = self.call("llama_model_default_params", Blob)
        if devices is not None:
            self.devices = (ctypes.c_void_p * (len(devices) + 1))(*devices)
            params.set(DEVICES, "<Q", ctypes.addressof(self.devices))
        if layers is not None:
            params.set(N_GPU_LAYERS, "<i", layers)
        return self.call("llama_model_load_from_file", ctypes.c_void_p, path.encode(), params)

    def make_context(self, model, flash_attention):
        params = self.call("llama_context_default_params", Blob)
        params.set(N_CTX, "<I", 512)
        params.flash_attention({"on": 1, "off": 0, "auto": -1}[flash_attention])
        model = ctypes.c_void_p(model)
        context = self.call("llama_init_from_model", ctypes.c_void_p, model, params)
        if context:
            self.call("llama_set_n_threads", None, ctypes.c_void_p(context), 1, 1)
        return context

    def tokens(self, vocab, text):
        tokens = (ctypes.c_int32 * 64)()
        arguments = vocab, text, len(text), tokens, len(tokens), True, True
        return list(tokens[: self.call("llama_tokenize", ctypes.c_int32, *arguments)])

    def piece(self, vocab, token):
        piece = ctypes.create_string_buffer(64)
        arguments = vocab, token, piece, len(piece), 0, False
        n = self.call("llama_token_to_piece", ctypes.c_int32, *arguments)
        return piece.raw[:n]

    def complete(self, model, context, prompt=PROMPT, n_tokens=4):
        """The most probable tokens, or None if decoding fails."""
        context = ctypes.c_void_p(context)
        vocab = self.call("llama_model_get_vocab", ctypes.c_void_p, ctypes.c_void_p(model))
        vocab = ctypes.c_void_p(vocab)
        n_vocab = self.call("llama_vocab_n_tokens", ctypes.c_int32, vocab)
        tokens, text = self.tokens(vocab, prompt), b""
        for _ in range(n_tokens):
            batch = (ctypes.c_int32 * len(tokens))(*tokens)
            given = self.call("llama_batch_get_one", Batch, batch, len(tokens))
            if self.call("llama_decode", ctypes.c_int32, context, given) != 0:
                return None
            numbers = ctypes.POINTER(ctypes.c_float)
            logits = self.call("llama_get_logits_ith", numbers, context, -1)[:n_vocab]
            tokens = [logits.index(max(logits))]
            text += self.piece(vocab, tokens[0])
        return text.decode()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("model")
    parser.add_argument("--load", action="store_true")
    parser.add_argument("--no-device", action="store_true")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--flash-attn", choices=["on", "off", "auto"], default="auto")
    options = parser.parse_args()
    library = Library(options.folder)
    if options.load:
        library.load_back_ends()
    model = library.load_model(options.model, [] if options.no_device else None, options.layers)
    if not model:
        sys.exit(4)
    context = library.make_context(model, options.flash_attn)
    if not context:
        sys.exit(3)
    text = library.complete(model, context)
    wait_until_seen(sys.argv[0])
    sys.exit(5) if text is None else print(text)


if __name__ == "__main__":
    main()
