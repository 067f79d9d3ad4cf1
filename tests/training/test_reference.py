"""The reference policy that shares the policy's modules, against models of their own; on ranks: reference_ranks.py."""

import copy

import pytest
import torch
from ranks import on_ranks
from reference_ranks import check_all
from torch import nn

from posttrain.config import Architecture, ModelConf, Strategy
from posttrain.config.algorithm import KLConf, ReferenceDevice
from posttrain.models.loading import load
from posttrain.training.reference import make_reference

IDS = torch.arange(1, 25).view(2, 12)
KL = KLConf(coefficient=0.1)


def logits(model):
    return model(input_ids=IDS, use_cache=False).logits


def train(model, steps=2):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(steps):
        logits(model).logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def policy():
    return load(ModelConf(architecture=Architecture.qwen3_5_moe))[0]


@pytest.mark.parametrize("device", ReferenceDevice)
def test_it_has_the_logits_of_a_model_of_its_own(policy, device):
    other = copy.deepcopy(policy)
    reference = make_reference(policy, KLConf(coefficient=0.1, reference=device))
    train(policy)
    trained, expected = logits(policy).detach(), logits(other).detach()
    assert (trained - expected).abs().max() > 0.1
    for _ in range(2):
        with reference.in_place(policy):
            torch.testing.assert_close(logits(policy), expected, rtol=0, atol=1e-5)
            assert not torch.is_grad_enabled()
        assert torch.is_grad_enabled() and torch.equal(logits(policy), trained)


def test_without_a_penalty_there_is_none(policy):
    assert make_reference(policy, KLConf(coefficient=0.0)) is None


class Adapter(nn.Module):
    """LoRA around a linear layer: W x + B A x, B = 0."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.A = nn.Parameter(torch.randn(4, base.in_features) / 8)
        self.B = nn.Parameter(torch.zeros(base.out_features, 4))

    def forward(self, x):
        return self.base(x) + x @ self.A.T @ self.B.T


def test_under_an_adapter_it_is_the_base_model_for_a_copy_of_the_adapter(policy):
    base = logits(policy).detach()
    policy.requires_grad_(False)
    for layer in policy.model.layers:
        layer.mlp.shared_expert.down_proj = Adapter(layer.mlp.shared_expert.down_proj)
    reference = make_reference(policy, KL)
    assert sum(shard.numel() for shard in reference._shards) == 4 * 4 * (64 + 96)
    train(policy)
    assert (logits(policy) - base).abs().max() > 0.1
    with reference.in_place(policy):
        assert torch.equal(logits(policy), base)


@pytest.mark.parametrize("mix", [0.0, 0.3, 0.8, 1.0])
def test_it_moves_towards_the_policy(policy, mix):
    reference = make_reference(policy, KL)
    start = [parameter.detach().double() for parameter in policy.parameters()]
    train(policy)
    now = [parameter.detach().double() for parameter in policy.parameters()]
    assert not reference.moved
    reference.refresh(policy, mix)
    assert reference.moved
    train(policy)
    with reference.in_place(policy):
        for parameter, old, new in zip(policy.parameters(), start, now, strict=True):
            torch.testing.assert_close(parameter.double(), (1 - mix) * old + mix * new, rtol=1e-6, atol=1e-7)
            assert mix < 1 or torch.equal(parameter.double(), new)


def test_inside_autocast_no_cast_weights_outlive_the_change(policy):
    reference = make_reference(policy, KL)
    with torch.autocast("cpu", torch.bfloat16):
        expected = logits(policy).detach()
    train(policy)
    with torch.autocast("cpu", torch.bfloat16):
        trained = logits(policy).detach()
        with reference.in_place(policy):
            inside = logits(policy)
        assert torch.equal(logits(policy), trained)
    assert (trained - expected).abs().max() > 0.5
    torch.testing.assert_close(inside, expected, rtol=0, atol=0.1)


def test_misuse_is_an_error(policy):
    reference = make_reference(policy, KL)
    before = [parameter.detach().clone() for parameter in policy.parameters()]
    train(policy)
    after = [parameter.detach().clone() for parameter in policy.parameters()]
    with reference.in_place(policy):
        with pytest.raises(RuntimeError, match="in place already"), reference.in_place(policy):
            pass
        with pytest.raises(RuntimeError, match="in place already"):
            reference.refresh(policy, 1.0)
        assert all(map(torch.equal, policy.parameters(), before))
    assert all(map(torch.equal, policy.parameters(), after))
    loss = logits(policy).mean()
    with reference.in_place(policy):
        pass
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def check_on_ranks(folder, starts):
    """{number of ranks: cases}"""
    for world, cases in starts.items():
        ended = on_ranks(world, check_all, folder, cases)
        assert ended.status == 0, ended.output
        for rank in range(world):
            assert f"checked {','.join(cases)} on rank {rank} of {world}" in ended.output


def test_on_two_four_and_one_rank(tmp_path):
    two = ["full_shard-fp32", "shard_grad_op-bf16", "no_shard-bf16"]
    check_on_ranks(tmp_path, {2: two, 4: ["hybrid_shard-fp32"], 1: ["full_shard-bf16"]})


@pytest.mark.slow
def test_every_strategy_and_dtype_on_every_number_of_ranks(tmp_path):
    every = [f"{strategy}-{dtype}" for strategy in Strategy for dtype in ("fp32", "bf16")]
    fewer = [case for case in every if "hybrid_shard" not in case]
    check_on_ranks(tmp_path, {2: fewer, 4: every, 1: fewer})
