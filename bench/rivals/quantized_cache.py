#!/usr/bin/env python3
"""Measures transformers' QuantizedCache (backends quanto and HQQ) on the texts and positions of
llama-perplexity, compared with DynamicCache, and appends lines to bench/results/rivals.csv.

    python3 scripts/fetch.py torch      # prints the Python that this needs
    PYTHON -m pip install --no-deps --target DIR --require-hashes -r bench/rivals/python.txt
    PYTHONPATH=DIR PYTHON bench/rivals/quantized_cache.py -m model.gguf -f wiki.test.raw

Tokens come in calls of 512, as llama.cpp's batches do. With one call for the whole text attention
would read no compressed row. Scales, zero points and exact tokens count 2 bytes a number, because
models run with 16-bit floats, while this runs with float32. All caches read a call before the next
call comes, so that logits of one call are in memory."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
import transformers  # noqa: E402
from record import append, context, model_name, options_of  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache  # noqa: E402

CALL = 512


def tensors(thing):
    """All plain tensors inside a quantised tensor of quanto, or inside HQQ's tensor and its
    description."""
    if isinstance(thing, dict):
        thing = list(thing.values())
    if isinstance(thing, (list, tuple)):
        for inner in thing:
            yield from tensors(inner)
    elif hasattr(thing, "__tensor_flatten__") and type(thing) is not torch.Tensor:
        for name in thing.__tensor_flatten__()[0]:
            yield from tensors(getattr(thing, name))
    elif isinstance(thing, torch.Tensor):
        yield thing


def count_bits(cache, numbers):
    size = 0
    for layer in cache.layers:
        held = [layer._quantized_keys, layer._quantized_values, layer.keys, layer.values]
        for tensor in tensors(held):
            size += tensor.numel() * (2 if tensor.is_floating_point() else tensor.element_size())
    return 8 * size / numbers


def divergences(reference, found):
    """The KL divergence of each row of logits, and whether its first choice is the reference's."""
    p, q = (torch.log_softmax(x, -1) for x in (reference, found))
    return (p.exp() * (p - q)).sum(-1), (p.argmax(-1) == q.argmax(-1)).float()


def summary(kld, same):
    """Numbers of llama-perplexity, from the divergences of all rows."""
    return {
        "kld_mean": f"{kld.mean():.6f}",
        "kld_se": f"{kld.std() / len(kld) ** 0.5:.6f}",
        "kld_p99": f"{kld.quantile(0.99):.6f}",
        "top1": f"{same.mean():.6f}",
    }


def read(model, ids, caches):
    """{cache: negative log-likelihoods, divergences from the first cache and agreements} of the
    predictions in the second half of the ids."""
    found = {name: [] for name in caches}
    for first in range(0, len(ids), CALL):
        call, after = ids[None, first : first + CALL], ids[first + 1 : first + CALL + 1]
        scored = slice(max(len(ids) // 2 - first, 0), len(after))
        exact = None
        for name, cache in caches.items():
            hidden = model.model(call, past_key_values=cache, use_cache=True).last_hidden_state
            if scored.start < scored.stop:
                logits = model.lm_head(hidden[0, scored]).float()
                exact = logits if exact is None else exact
                nll = torch.nn.functional.cross_entropy(logits, after[scored], reduction="none")
                found[name].append((nll, *divergences(exact, logits)))
    return {name: [torch.cat(parts) for parts in zip(*calls)] for name, calls in found.items()}


def new_cache(name, config):
    kind, _, bits = name.partition(":")
    return transformers.QuantizedCache(kind, config, nbits=int(bits))


def kv_dimensions(config):
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_key_value_heads * head


def load(options):
    """The model, and the ids of the first tokens of the text."""
    folder, file = options.model.parent, options.model.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    text = options.text.read_text()[: 16 * options.length]
    return model, tokenizer(text, return_tensors="pt").input_ids[0, : options.length]


def parser_of(words, output):
    """A parser with the options that load() needs, and with a file of bench/results."""
    parser = options_of(words)
    results = pathlib.Path(__file__).resolve().parents[1] / "results"
    parser.add_argument("-m", "--model", type=pathlib.Path, required=True)
    parser.add_argument("-f", "--text", type=pathlib.Path, required=True)
    parser.add_argument("-c", "--length", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("-o", "--output", type=pathlib.Path, default=results / output)
    return parser


@torch.no_grad()
def main():
    parser = parser_of(__doc__, "rivals.csv")
    parser.add_argument("--caches", default="quanto:4,quanto:2,hqq:4,hqq:2")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    file = options.model.name
    model, ids = load(options)
    caches = {"f16": DynamicCache(config=model.config)}
    caches |= {name: new_cache(name, model.config) for name in options.caches.split(",")}
    command = ["quantized_cache.py", "-m", file, "-f", options.text.name, "-c", str(len(ids))]
    found = read(model, ids, caches)
    for name in list(caches)[1:]:
        nll, kld, same = found[name]
        numbers = 2 * len(ids) * len(caches[name].layers) * kv_dimensions(model.config)
        row = {
            "program": "transformers",
            "version": transformers.__version__,
            "cache": name.replace(":", ", ") + " bits",
            "model": model_name(options.model),
            "text": options.text.name,
            "length": str(len(ids)),
            "chunks": "1",
            "from": str(len(ids) // 2),
            "to": str(len(ids) - 2),
            "bits": f"{count_bits(caches[name], numbers):.2f}",
            "ppl": f"{nll.mean().exp():.6f}",
            **summary(kld, same),
            **context(command),
        }
        append(options.output, [row])
        print(name, row, flush=True)


if __name__ == "__main__":
    main()
