"""Small models of many families, what torch's FLOP counter says of them, and what it counts beyond the useful FLOPs."""

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

TOKENS = 70  # more than one chunk of the gated delta rule, and no multiple of it
CHUNK = 64
SHAPE = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "max_position_embeddings": 512,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False,
}  # fmt: skip
GATED_DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 24, "linear_conv_kernel_dim": 4,
}  # fmt: skip
EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "moe_intermediate_size": 40,
}  # fmt: skip
FAMILIES = {
    "qwen3_5_text": GATED_DELTA,
    "qwen3_5_moe_text": GATED_DELTA | EXPERTS,
    "qwen3_next": GATED_DELTA | EXPERTS,
    "olmo_hybrid": GATED_DELTA,
    "qwen3": {},
    "qwen2": {},
    "llama": {},
    "qwen3_moe": EXPERTS,
    "mixtral": {"num_local_experts": 4},
    "deepseek_v3": LATENT,
    "gpt_oss": {"num_local_experts": 4, "sliding_window": 16},
    "gemma2": {"sliding_window": 16},
    "gpt2": {},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
}
ATTENTION_ONLY = [family for family, fields in FAMILIES.items() if "linear_num_key_heads" not in fields]


def build(family, device="cpu", **fields):
    fields = SHAPE | FAMILIES.get(family, {}) | fields
    if family in ("gpt2", "opt", "deepseek_v3"):
        fields = {key: fields[key] for key in fields if key not in ("head_dim", "num_key_value_heads")}
    if family == "deepseek_v3":
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    config = AutoConfig.for_model(family, **fields)
    config._experts_implementation = "batched_mm"  # the counter does not see the grouped kernel
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def counted(model, backward=False, tokens=TOKENS, logits=0):
    """FlopCounterMode's total for one document; all positions have logits unless `logits` says how many."""
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(backward):
        out = model(torch.arange(tokens)[None] % 100, use_cache=False, logits_to_keep=logits)
        if backward:
            out.logits.sum().backward()
    return counter.get_total_flops()


def counters_excess(config, tokens):
    """What FlopCounterMode counts in a forward pass beyond the useful FLOPs, from config fields.

    Attention of every query to every key, also those masked; the chunked algorithm of the gated delta rule
    (its triangular solves are not counted); the convolution's outputs beyond the last token.
    """
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    heads = config.num_attention_heads
    if hasattr(config, "v_head_dim"):
        width = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim) / 2
    else:
        width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    excess = 0
    for kind in kinds:
        if kind == "linear_attention":
            hv, dk, dv = (
                config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
            )  # fmt: skip
            channels, taps = 2 * config.linear_num_key_heads * dk + hv * dv, config.linear_conv_kernel_dim
            padded = -(-tokens // CHUNK) * CHUNK
            excess += hv * padded * (4 * CHUNK * dk + 2 * CHUNK * dv + 6 * dk * dv)
            excess -= hv * tokens * 6 * dk * dv
            excess += 2 * taps * channels * (taps - 1)
        else:
            window = config.sliding_window if kind == "sliding_attention" else tokens
            seen = sum(min(position, window) for position in range(1, tokens + 1))
            excess += 4 * width * (tokens**2 - seen)
    return excess


def trainable(name, model):
    """Freeze a model but for what comes after its first layer, the norms, one MLP, the head, or nothing."""
    keep = {
        "later layers": lambda n: not n.startswith(("model.embed_tokens", "model.layers.0.")),
        "norms": lambda n: "norm" in n,
        "one mlp": lambda n: n.startswith("model.layers.2.mlp.down_proj"),
        "head": lambda n: n.startswith("lm_head"),
        "nothing": lambda n: False,
    }[name]
    for key, weight in model.named_parameters():
        weight.requires_grad_(keep(key))
    return model
