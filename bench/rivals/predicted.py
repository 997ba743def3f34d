#!/usr/bin/env python3
"""Measures what predicting a layer's keys and values from the layer below is worth (`predicted` of
ideas.py), in whole models: KL divergence from an exact cache, with and without prediction, at equal
bits of codes. Keys and values are quantised and restored; nothing is stored compressed.

    python3 scripts/fetch.py torch      # prints the Python that this needs; and libkvant
    PYTHON bench/rivals/predicted.py -m model.gguf -f wiki.test.raw

Tokens come in calls of 512, and a call sees its own rows exact. After 1024 tokens the cache learns
W, centres and predictions from them, and restores all rows but the first 64. Rows of later calls
are restored with what was learned. Tokens from 1024 on are scored."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import ideas  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from quantized_cache import CALL, divergences, load, parser_of, summary  # noqa: E402
from record import append, context, model_name  # noqa: E402
from transformers import DynamicCache  # noqa: E402

LEARN, EXACT = ideas.LEARN, ideas.EXACT


class Learner:
    """W, centres and predictions of all layers, from rows [heads, LEARN, dim]."""

    def __init__(self, bits, predicts, rope):
        self.bits, self.predicts, self.rope = bits, predicts, rope
        self.made = {}

    def restore(self, layer, role, rows, inputs, queries):
        """Rows after the codec. inputs: rows of the layer below, or None."""
        key = layer, role
        if key not in self.made:
            self.made[key] = self.learn(rows, inputs, queries)
        guess_of, transforms = self.made[key]
        guess = guess_of(rows, inputs)
        if role == "k":
            guess = self.rope.turn(guess, 1)
        rest = rows - guess if role == "v" else self.rope.turn(rows, 1) - guess
        coded = [ideas.coded(r, t, self.bits) for r, t in zip(rest, transforms)]
        return np.stack(coded) + guess

    def learn(self, rows, inputs, queries):
        mean = rows[:, EXACT:LEARN].mean(1, keepdims=True)
        weights = None
        if inputs is not None:
            x = wide(inputs)
            some, target = x[EXACT:LEARN], ideas.wide(rows)[EXACT:LEARN]
            square = some.T @ some
            square += ideas.RIDGE * np.trace(square) / len(square) * np.eye(len(square)) / 100
            weights = np.linalg.solve(square, some.T @ target)

        def guess_of(rows, inputs):
            if weights is None:
                return np.broadcast_to(mean, rows.shape)
            made = wide(inputs) @ weights
            return made.reshape(rows.shape[1], rows.shape[0], -1).transpose(1, 0, 2)

        guess = guess_of(rows, inputs)
        if queries is None:
            rest, each = rows - guess, [None] * len(rows)
        else:
            rest, each = self.rope.turn(rows, 1) - self.rope.turn(guess, 1), queries
        return guess_of, [ideas.transform_of(r, q) for r, q in zip(rest, each)]


def wide(inputs):
    made = np.concatenate([ideas.wide(x) for x in inputs], 1)
    return np.concatenate([made, np.ones((len(made), 1))], 1)


class Compressed:
    """A model's cache that is restored after each call."""

    def __init__(self, model, learner, queries):
        self.cache = DynamicCache(config=model.config)
        self.learner, self.queries = learner, queries
        self.done = 0  # rows that were restored

    def after_call(self):
        n = self.cache.get_seq_length()
        if self.learner is None or n < LEARN:
            return
        below = None
        for number, layer in enumerate(self.cache.layers):
            keys, values = (x[0].numpy().astype("f8") for x in (layer.keys, layer.values))
            rope, learner = self.learner.rope, self.learner
            plain = rope.turn(keys, -1)
            usable = learner.predicts and below is not None
            made_k = learner.restore(
                number, "k", plain, [below[0]] if usable else None, self.queries[number]
            )
            unturned = rope.turn(made_k, -1)
            inputs = [unturned, below[1]] if usable else None
            made_v = learner.restore(number, "v", values, inputs, None)
            # Rows that were restored before are what later rows were computed from.
            first = max(self.done, EXACT)
            for tensor, made in ((layer.keys, made_k), (layer.values, made_v)):
                tensor[0, :, first:] = torch.from_numpy(made[:, first:].astype("f4"))
            below = unturned, made_v
        self.done = n


def read_queries(model, found, rope):
    """Hooks that collect the queries of the first LEARN tokens: {layer: [kv heads, n, dim]}."""
    config = model.config
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    hooks = []

    def hook_of(number):
        def hook(module, inputs, output):
            rows = output[0].detach().numpy().astype("f8")
            found.setdefault(number, []).append(rows)

        return hook

    for number, layer in enumerate(model.model.layers):
        hooks.append(layer.self_attn.q_proj.register_forward_hook(hook_of(number)))

    def finish():
        for hook in hooks:
            hook.remove()
        for number, calls in found.items():
            rows = np.concatenate(calls)[:LEARN]
            heads = rows.reshape(len(rows), -1, dim).transpose(1, 0, 2)
            heads = rope.turn(heads, 1)[:, EXACT::4]
            found[number] = heads.reshape(config.num_key_value_heads, -1, dim)

    return finish


def logits(model, ids, cache):
    parts = []
    for first in range(0, len(ids), CALL):
        call = ids[None, first : first + CALL]
        out = model.model(call, past_key_values=cache.cache, use_cache=True)
        if first >= LEARN:
            parts.append(model.lm_head(out.last_hidden_state[0]).float())
        cache.after_call()
    return torch.cat(parts)


@torch.no_grad()
def main():
    parser = parser_of(__doc__, "rivals_predicted.csv")
    parser.add_argument("--bits", default="2,3")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, ids = load(options)
    theta = model.config.rope_parameters["rope_theta"]
    rope, queries = ideas.Rope(f"{theta}"), {}
    finish = read_queries(model, queries, rope)
    exact = logits(model, ids, Compressed(model, None, None))
    finish()
    for bits in map(int, options.bits.split(",")):
        for predicts in (False, True):
            learner = Learner(bits, predicts, rope)
            found = logits(model, ids, Compressed(model, learner, queries))
            row = {
                "model": model_name(options.model),
                "codec": f"trellis-{bits}" + (", predicted" if predicts else ""),
                "text": options.text.name,
                "length": str(len(ids)),
                **summary(*divergences(exact, found)),
                **context(["predicted.py", "-m", options.model.name, "-f", options.text.name]),
            }
            append(options.output, [row])
            print(*list(row.values())[:8], flush=True)


if __name__ == "__main__":
    main()
