"""The programs of transformers.md, run as they are in the page, with tiny models."""

import contextlib
import io
import os
import sys
import tempfile
import unittest
from unittest import mock

import models
import torch
import transformers
from common import ROOT, TestCase

import kvant
import kvant.torch  # noqa: F401
import kvant.transformers

sys.path.insert(0, str(ROOT / "tests" / "docs"))
import blocks  # noqa: E402

PAGE = ROOT / "docs" / "start" / "transformers.md"


class Tokenizer:
    """A tokenizer whose tokens are letters."""

    def __call__(self, text, return_tensors=None, add_special_tokens=True):
        ids = [3 + ord(letter) % 290 for letter in text]
        return {"input_ids": torch.tensor([ids]) if return_tensors else ids}

    def apply_chat_template(self, chat, **options):
        assert options == {
            "add_generation_prompt": True,
            "return_dict": True,
            "return_tensors": "pt",
        }
        return transformers.BatchEncoding(self(chat[0]["content"], "pt"))

    def decode(self, ids):
        return " ".join(map(str, ids.tolist()))


def run(program, **names):
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(program, str(PAGE), "exec"), names)
    return said.getvalue(), names


class Guide(TestCase):
    def setUp(self):
        self.transformers, self.quality = blocks.of_kind(PAGE.read_text(), "tiny")

    def test_transformers(self):
        def load(name, attn_implementation):
            return models.make("llama", attn_implementation)

        with (
            mock.patch.object(transformers.AutoModelForCausalLM, "from_pretrained", load),
            mock.patch.object(
                transformers.AutoTokenizer, "from_pretrained", lambda name: Tokenizer()
            ),
        ):
            said, names = run(self.transformers)
        lines = said.splitlines()
        self.assertEqual(len(lines), 3, said)
        for line in lines[:2]:
            self.assertRegex(line, r" \d+ tokens, [0-9.]+ per second$")
        cache, stored = names["cache"], 20 + names["n"] - 1  # the newest token is not stored
        self.assertGreater(stored, 64)
        self.assertEqual(
            lines[2],
            f"KvantCache(preset='balanced': {stored} tokens, {cache.bytes} bytes) "
            f"instead of {cache.f16_bytes}",
        )
        self.assertEqual(cache.f16_bytes, 4 * stored * 2 * 2 * 16 * 2)
        self.assertLess(cache.bytes, cache.f16_bytes)

    def test_quality(self):
        with tempfile.TemporaryDirectory() as folder:
            before = os.getcwd()
            os.chdir(folder)
            try:
                texts = ["".join(chr(32 + i * i % 90) for i in range(2100))]
                said, _ = run(
                    self.quality,
                    KvantCache=kvant.transformers.KvantCache,  # the cache of the program before
                    model=models.make("llama", max_position_embeddings=4096),
                    texts=texts,
                    tokenizer=Tokenizer(),
                )
                self.assertEqual(kvant.Calibration("model.kvcal").info.n_tokens, 2100)
            finally:
                os.chdir(before)
        self.assertEqual(
            [line.split()[0] for line in said.splitlines()], ["stock", "balanced", "small"]
        )


if __name__ == "__main__":
    unittest.main()
