"""Random tiny models of six architectures (and one more), and caches to compare KvantCache with."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import common  # noqa: E402, F401  puts the package on the path
import torch  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402
from transformers.cache_utils import DynamicCache  # noqa: E402

import kvant.transformers  # noqa: E402, F401  registers the attention

torch.set_num_threads(1)

WINDOW = 16
MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
GEMMA = MIXED | {"query_pre_attn_scalar": 16}
KINDS = {
    "llama": {},  # GQA
    "qwen2": {"num_key_value_heads": 1},  # biases, MQA
    "mistral": {"sliding_window": WINDOW},  # a window in every layer
    "gemma2": GEMMA | {"attn_logit_softcapping": 2.0},
    "gemma3_text": GEMMA,
    "gpt_oss": MIXED | {"num_local_experts": 4, "num_experts_per_tok": 2},  # sinks
    "phi3": {"num_key_value_heads": 4, "pad_token_id": 0},  # one projection of q, k and v, MHA
}


def make(kind, implementation="kvant", seed=0, **options):
    """Weights that are large enough for attention to distinguish tokens."""
    torch.manual_seed(seed)
    shape = dict(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    shape |= dict(head_dim=16, vocab_size=300, max_position_embeddings=2048, initializer_range=0.3)
    shape |= KINDS[kind] | options
    if "layer_types" in shape:
        shape["layer_types"] = shape["layer_types"][: shape["num_hidden_layers"]]
    config = AutoConfig.for_model(kind, **shape)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if "sinks" in name:
                weights.normal_()
            if "embed_tokens" in name and "gemma" in kind:
                # the embedding is tied to the output: otherwise each token would only be followed
                # by itself
                weights *= 0.1
    return model


def twins(kind, *implementations, **options):
    """The same model with different attention implementations."""
    models = [make(kind, implementation, **options) for implementation in implementations]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    return models


def prompt(n=40, batch=2, padding=7, seed=1):
    """Tokens and their mask: the first sequence is padded on the left."""
    tokens = torch.randint(3, 300, (batch, n), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(tokens)
    mask[0, :padding] = 0
    return tokens, mask


class RoundTripped(DynamicCache):
    """A stock cache that stores rows after a codec encoded and decoded them: rounded(layer, role,
    rows) returns the decoded rows.
    """

    def __init__(self, config, rounded):
        super().__init__(config=config)
        self.rounded = rounded

    def update(self, k, v, layer_idx, *arguments, **options):
        k, v = (self.rounded(layer_idx, role, rows) for role, rows in (("k", k), ("v", v)))
        return super().update(k, v, layer_idx, *arguments, **options)
