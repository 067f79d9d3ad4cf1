"""The estimate of memory: against what a run really holds and saves, on the embedded models."""

import pytest
import torch

from posttrain.config import (
    Architecture,
    FSDPConf,
    GRPOConf,
    ModelConf,
    PackingConf,
    PackingMode,
    RolloutConf,
    Strategy,
)
from posttrain.models import gdn_packing
from posttrain.models.loading import load
from posttrain.preflight import memory


def model_of(architecture="qwen3_5_dense", **options):
    model, _ = load(ModelConf(architecture=Architecture(architecture), **options))
    gdn_packing.patch(model)
    return model


def saved_bytes(model, tokens):
    """What torch.autograd keeps of one packed row, weights left out: counted by storage, another way than ours."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    alive = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: alive.append(t) or t, lambda t: t):
        output = model(
            input_ids=torch.ones(1, tokens, dtype=torch.long),
            **gdn_packing.boundaries((tokens // 2, tokens - tokens // 2), "cpu"),
            logits_to_keep=1,
        )
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in alive}
    del output
    return sum(size for pointer, size in storages.items() if pointer not in own)


@pytest.mark.parametrize("architecture", ["qwen3_5_dense", "qwen3_5_moe", "qwen3_next", "qwen3_dense"])
def test_activations_grow_by_the_token(architecture):
    """A line through two short rows, met at a row four times as long."""
    model = model_of(architecture)
    assert memory.activations(model)(768) == pytest.approx(saved_bytes(model, 768), rel=0.1)


def test_recomputed_layers_keep_less():
    every, some = (memory.activations(model_of(gradient_checkpointing=flag)) for flag in (False, True))
    assert 0.2 * every(4096) < some(4096) < 0.7 * every(4096)


def test_the_cache_of_attention_is_keys_and_values():
    model = model_of("qwen3_dense")
    config = model.config
    line = memory.sampler_cache(model)
    each = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    assert line.each == each and line.fixed == pytest.approx(0, abs=each)


def test_the_state_of_gated_delta_net_does_not_grow():
    model = model_of("qwen3_5_dense")
    line, kinds = memory.sampler_cache(model), model.config.layer_types
    attention = sum(kind == "full_attention" for kind in kinds)
    config = model.config
    assert line.each == 2 * attention * config.num_key_value_heads * config.head_dim * 4
    state = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim * 4
    assert line.fixed >= (len(kinds) - attention) * state


@pytest.mark.parametrize("strategy, held", [("full_shard", 0.25), ("shard_grad_op", 0.25), ("no_shard", 1.0)])
def test_what_is_held_is_a_rank_s_share(strategy, held):
    model = model_of("qwen3_dense")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    cfg = GRPOConf(
        packing=PackingConf(mode=PackingMode.thd), fsdp=FSDPConf(strategy=Strategy(strategy)), rollout=RolloutConf()
    )
    phases = memory.of_a_rank(model, cfg, ranks=4, width=2, longest=64)
    for phase in phases.values():
        assert phase["weights"] == pytest.approx(4 * parameters * held)
        assert phase["AdamW's averages"] == pytest.approx(8 * parameters * held)
    assert phases["update"]["gradients"] == pytest.approx(4 * parameters * (2 if strategy == "no_shard" else held))


def test_what_a_step_of_adamw_holds_is_what_is_said():
    model = model_of("qwen3_dense")
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.ones(1, 8, dtype=torch.long), use_cache=False).logits.sum().backward()
    optimizer.step()
    state = sum(v.nbytes for values in optimizer.state.values() for v in values.values() if v.ndim)
    gradients = sum(parameter.grad.nbytes for parameter in model.parameters())
    cfg = GRPOConf(packing=PackingConf(mode=PackingMode.thd), fsdp=FSDPConf(strategy=Strategy.full_shard))
    update = memory.of_a_rank(model, cfg, ranks=1, width=4, longest=64)["update"]
    assert (update["AdamW's averages"], update["gradients"]) == (state, gradients)
