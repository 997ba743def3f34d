"""Tiny random models whose layers have different kinds of blocks, of architectures that both the
installed transformers and vLLM have.
"""

import json
import pathlib

import safetensors.torch
import torch
import transformers

_SHAPE = dict(
    vocab_size=300,
    hidden_size=128,
    intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
)
_SHAPE |= dict(
    max_position_embeddings=2048,
    initializer_range=0.1,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)
_EXPERTS = dict(
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    shared_expert_intermediate_size=64,
)
_LINEAR = dict(
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=64,
    linear_value_head_dim=64,
)
_CONVOLUTION = dict(conv_dim=128, block_dim=128, block_auto_adjust_ff_dim=False)
_GEMMA = dict(
    sliding_window=64,
    vocab_size_per_layer_input=300,
    hidden_size_per_layer_input=16,
    global_head_dim=128,
    tie_word_embeddings=False,
)
_LATENT = dict(
    kv_lora_rank=64,
    q_lora_rank=64,
    qk_rope_head_dim=32,
    qk_nope_head_dim=64,
    v_head_dim=64,
    first_k_dense_replace=2,
)

KINDS = {
    # recurrent and attention layers, whose blocks share memory
    "Qwen3NextConfig": _EXPERTS
    | _LINEAR
    | dict(layer_types=["linear_attention", "full_attention"] * 2, head_dim=64),
    "Lfm2Config": _CONVOLUTION | dict(layer_types=["conv", "full_attention"] * 2),
    # windows, two head dims, layers that share the keys of another layer
    "Gemma4TextConfig": _GEMMA
    | dict(
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        num_kv_shared_layers=0,
        head_dim=64,
    ),
    # a head that predicts one more token (MTP)
    "Ernie4_5_MoeConfig": dict(
        moe_num_experts=4,
        moe_k=2,
        moe_num_shared_experts=1,
        moe_intermediate_size=64,
        head_dim=64,
        num_nextn_predict_layers=1,
        tie_word_embeddings=False,
    ),
    # other attention
    "DeepseekV3Config": _LATENT
    | dict(
        num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1
    ),
    "BertConfig": dict(num_hidden_layers=2),
}


def save(kind, folder, **options):
    torch.manual_seed(0)
    shape = _SHAPE | {"num_hidden_layers": len(KINDS[kind].get("layer_types", range(4)))}
    config = getattr(transformers, kind)(**shape | KINDS[kind] | options)
    made = transformers.AutoModel if kind == "BertConfig" else transformers.AutoModelForCausalLM
    model = made.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.dim() == 2 and any(
                part in name for part in ("q_proj", "k_proj", "v_proj", "o_proj")
            ):
                weights.normal_(0, 0.15)  # attention distinguishes tokens
    model.save_pretrained(folder)


def save_mtp_head(folder, n_layers=4):
    """Adds the weights of an MTP head to a saved model of Ernie4_5_MoeConfig: its block is a copy
    of the first layer, which has no experts.
    """
    weights = safetensors.torch.load_file(f"{folder}/model.safetensors")
    of_block, made = "model.layers.0.", {}
    for name, x in weights.items():
        if name.startswith(of_block):
            made[f"model.mtp_block.0.{name.removeprefix(of_block)}"] = x.clone()
    size = weights["model.norm.weight"].shape[0]
    for norm in ("mtp_emb_norm", "mtp_hidden_norm"):
        made[f"model.{norm}.0.weight"] = torch.ones(size)
    both = torch.cat([torch.eye(size), torch.eye(size)], 1)
    made["model.mtp_linear_proj.0.weight"] = both
    safetensors.torch.save_file(made, f"{folder}/mtp.safetensors")


def save_adapter(folder, model, rank=8):
    """A random LoRA adapter of a Llama model's attention, as the package peft saves one."""
    random, made = torch.Generator().manual_seed(5), {}
    projections = ("q_proj", "k_proj", "v_proj")
    for name, weights in model.named_parameters():
        if name.split(".")[-2] in projections:
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            out, in_ = weights.shape
            for part, shape in (("A", (rank, in_)), ("B", (out, rank))):
                made[f"{stem}.lora_{part}.weight"] = 0.2 * torch.randn(shape, generator=random)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank}
    config |= {"target_modules": list(projections), "bias": "none"}
    safetensors.torch.save_file(made, f"{folder}/adapter_model.safetensors")
    pathlib.Path(folder, "adapter_config.json").write_text(json.dumps(config))
