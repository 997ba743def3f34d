"""Every kind of model in the installed transformers, tiny and random, with
attn_implementation="kvant" and with a KvantCache of exact rows. Each gives the logits of eager
attention, or a refusal whose line names kvant. No model is silently wrong, and no layer is silently
uncompressed.

    test_every_model.py              all models (a minute of CPU)
    test_every_model.py some         the models in SOME, for each change
    test_every_model.py bloom mpt    these model types

Prints which models were tried and which could not be built. Fails for a class that is wrong, for a
refusal that does not name kvant, and if too few classes were built to mean anything.
"""

import collections
import inspect
import sys
import time
import warnings

import models  # noqa: F401  registers the attention
import tiny
import torch
import transformers

from kvant.transformers import KvantCache

# Models that contain their own attention, in tables of classes, and models with the common
# attention; windows, sinks, MLA, hybrids.
SOME = (
    "big_bird bloom codegen deepseek_v3 doge falcon falcon_h1 gemma2 gemma3 gpt2 gpt_neo "
    "gpt_neox_japanese gpt_oss gptj ibert "
    "imagegpt llama longformer megatron-bert mistral mllama mpt opt qwen3_next rembert roformer "
    "t5 trocr vit whisper xglm zaya"
).split()
# Share of the classes that must be built. On transformers 5.17 and 5.23, more than this share is
# built. If fewer are, tiny.py must learn new names of numbers.
LEAST = 0.5

# Rows are exact. Attention sums at most 24 tokens and 64 numbers in binary32. That errs by (24 + 64
# + 40) 2^-24 of the largest logit, less than 1e-5. There are at most 8 layers, whose matrices have
# rows of unit length, so logits err by less than 1e-3 of the largest logit. A mask that hides
# nothing moves them by more: see changed().
LIMIT = 1e-3
PROMPT = 20  # tokens in the first call of a conversation
PADDING = 5  # of the first sequence


class Unbuildable(Exception):
    pass


def values(out):
    """The output that later layers compute, as float32."""
    for name in ("logits", "last_hidden_state", "prediction_logits"):
        if torch.is_tensor(getattr(out, name, None)):
            return getattr(out, name).float()
    for x in out.values() if hasattr(out, "values") else out:
        if torch.is_tensor(x) and x.is_floating_point():
            return x.float()
    raise Unbuildable("no output that can be compared")


def difference(found, wanted):
    """The largest difference, divided by the largest logit. Rows of padding do not count."""
    if wanted.dim() == 3 and wanted.shape[1] == tiny.TOKENS:
        found, wanted = found[:, PADDING:], wanted[:, PADDING:]
    if not found.isfinite().all():
        return float("inf")
    return ((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30)).item()


class Case:
    """One class: its models, its inputs, and the right logits."""

    def __init__(self, name):
        self.model_class = getattr(transformers, name)
        self.config = tiny.shrunk(self.model_class.config_class)
        self.stock = tiny.make(self.model_class, self.config, "eager")
        self.given = tiny.inputs(self.stock, self.config)
        self.parameters = inspect.signature(self.stock.forward).parameters
        first = self.run(self.stock)
        if (
            "input_ids" in self.given
            and "attention_mask" in self.parameters
            and first.shape[1:2] == (tiny.TOKENS,)
        ):
            mask = torch.ones_like(self.given["input_ids"])
            mask[0, :PADDING] = 0
            self.given["attention_mask"] = mask
        self.wanted = self.run(self.stock)
        if not self.wanted.isfinite().all() or not torch.equal(self.wanted, self.run(self.stock)):
            raise Unbuildable("eager attention gives NaNs, or other numbers in each call")
        self.steps = self.conversation(self.stock, None) if self.caches() else None

    def run(self, model):
        with torch.no_grad():
            return values(model(**self.given))

    def caches(self):
        takes = {"input_ids", "past_key_values"} <= set(self.parameters) and list(self.given)[
            :1
        ] == ["input_ids"]
        return (
            takes
            and self.stock.can_generate()
            and not getattr(self.config, "is_encoder_decoder", False)
        )

    def conversation(self, model, cache):
        """Logits of a prompt and of single tokens after it."""
        ids, mask, found = self.given["input_ids"], self.given.get("attention_mask"), []
        with torch.no_grad():
            for first, end in [(0, PROMPT), *((i, i + 1) for i in range(PROMPT, ids.shape[1]))]:
                options = {} if mask is None else {"attention_mask": mask[:, :end]}
                out = model(
                    input_ids=ids[:, first:end], past_key_values=cache, use_cache=True, **options
                )
                cache = out.past_key_values
                found.append(values(out))
        return torch.cat(found, 1)

    def changed(self):
        """How much another token in the middle changes the last row. A wrong mask would change it
        as much.
        """
        if self.steps is None:
            return 1.0
        before, ids = self.given["input_ids"], self.given["input_ids"].clone()
        ids[:, PROMPT // 2] = 101
        self.given["input_ids"] = ids
        try:
            return difference(self.run(self.stock)[:, -1:], self.wanted[:, -1:])
        finally:
            self.given["input_ids"] = before

    def exact_cache(self):
        """Logits with kvant. Also checks that every layer of attention is compressed, or that a
        warning says it is not.
        """
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            cache = KvantCache(self.config, k="f32", v="f32", exact=True, n_threads=1)
        kept = [
            layer
            for layer in cache.layers
            if hasattr(layer, "get_seq_length") and layer not in cache._others()
        ]
        left = [layer for layer in cache._others() if hasattr(layer, "get_seq_length")]
        if (left or not kept) and not any(
            "KvantCache compresses" in str(one.message) for one in said
        ):
            raise AssertionError(f"{len(left)} layers are not compressed, and nobody is told")
        return cache


def leg(call, *right):
    """Returns "right", or "refused" or "WRONG" with the reason."""
    try:
        found = call()
        worst = min(difference(found, wanted) for wanted in right if wanted.shape == found.shape)
        return "right" if worst < LIMIT else ("WRONG", f"off by {worst:.2g} of the largest")
    except Exception as error:
        words = f"{type(error).__name__}: {error}".replace("\n", " ")
        return (
            (
                "refused"
                if "kvant" in str(error).lower()
                and not isinstance(error, (KeyError, AssertionError))
                else "WRONG"
            ),
            words,
        )


def walk(name):
    """The verdicts on one class. A class is unbuildable if eager attention does not run."""
    try:
        case = Case(name)
        told = case.changed() > 10 * LIMIT
    except Exception as error:
        raise Unbuildable(f"{type(error).__name__}: {error}".replace("\n", " ")) from None
    found, ours = {}, []

    def plain():
        ours.append(tiny.make(case.model_class, case.config, "kvant"))
        return case.run(ours[0])

    found["kvant"] = leg(plain, case.wanted)
    if case.steps is not None:
        right = case.steps, case.wanted
        found["decoded"] = leg(lambda: case.conversation(case.stock, case.exact_cache()), *right)
        if ours and found["kvant"] == "right":
            found["pages"] = leg(lambda: case.conversation(ours[0], case.exact_cache()), *right)
    return found, told


def main(chosen):
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    todo = [(kind, name) for kind, name in tiny.classes() if not chosen or kind in chosen]
    results, unbuilt, blind, start = {}, {}, [], time.process_time()
    for kind, name in todo:
        before = time.process_time()
        try:
            results[kind], told = walk(name)
            blind += [] if told else [kind]
        except Unbuildable as error:
            unbuilt[kind] = str(error)
        if time.process_time() - before > 5:
            print(f"{kind}: {time.process_time() - before:.0f} s of CPU", flush=True)
    return report(todo, results, unbuilt, blind, time.process_time() - start, bool(chosen))


def report(todo, results, unbuilt, blind, seconds, some):
    legs = collections.Counter(
        (which, one if isinstance(one, str) else one[0])
        for r in results.values()
        for which, one in r.items()
    )
    print(
        f"transformers {transformers.__version__}: {len(todo)} classes, {len(results)} tried, "
        f"{seconds:.0f} s of CPU"
    )
    for (which, verdict), n in sorted(legs.items()):
        print(f"  {which:8} {verdict:8} {n}")
    for verdict in ("refused", "WRONG"):
        for kind, result in results.items():
            for which, one in result.items():
                if not isinstance(one, str) and one[0] == verdict:
                    print(f"{verdict} {kind}, {which}: {one[1][:200]}")
    print(f"could not be built: {len(unbuilt)}")
    for kind, why in unbuilt.items():
        print(f"  {kind}: {why[:110]}")
    print(f"tokens hardly depend on those before: {' '.join(blind) or 'none'}")
    wrong = sum(n for (_, verdict), n in legs.items() if verdict == "WRONG")
    few = len(results) < (0.9 if some else LEAST) * len(todo)
    print(f"{wrong} wrong" + (f"; only {len(results)} of {len(todo)} were built" if few else ""))
    return int(bool(wrong) or few or not todo)


if __name__ == "__main__":
    sys.exit(main(SOME if sys.argv[1:] == ["some"] else sys.argv[1:]))
