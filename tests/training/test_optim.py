"""The optimizer: rates of every schedule by a table, what decays, and a loss that only one rank finds not finite."""

import re

import pytest
import torch
from jobs import run_jobs
from transformers import AutoModelForCausalLM

from posttrain.config import OptimConf, Schedule
from posttrain.models.tiny import tiny_config
from posttrain.training.optim import learning_rate, make_optimizer


@pytest.mark.parametrize(
    "schedule, warmup, rates",
    [  # of the steps 0, 1, 4, 5 and 9, the last, of 10
        (Schedule.constant, 0, [1.0, 1.0, 1.0, 1.0, 1.0]),
        (Schedule.linear, 0, [1.0, 0.9, 0.6, 0.5, 0.1]),
        (Schedule.cosine, 0, [1.0, 0.975528, 0.654508, 0.5, 0.024472]),
        (Schedule.constant, 4, [0.25, 0.5, 1.0, 1.0, 1.0]),
        (Schedule.linear, 4, [0.25, 0.5, 1.0, 5 / 6, 1 / 6]),
        (Schedule.cosine, 4, [0.25, 0.5, 1.0, 0.933013, 0.066987]),
    ],
)
def test_the_learning_rate_of_first_middle_and_last_step(schedule, warmup, rates):
    cfg = OptimConf(lr=2e-4, schedule=schedule, warmup_steps=warmup)
    found = [learning_rate(cfg, step, 10) / 2e-4 for step in (0, 1, 4, 5, 9)]
    assert found == pytest.approx(rates, abs=1e-6)


def test_matrices_decay_and_nothing_else_does():
    model = AutoModelForCausalLM.from_config(tiny_config("qwen3_5_moe"), dtype=torch.float32)
    model.model.layers[3].self_attn.q_proj.bias = torch.nn.Parameter(torch.zeros(1))
    frozen = model.model.layers[0].mlp.gate.weight.requires_grad_(False)
    decayed, others = make_optimizer(model, OptimConf(weight_decay=0.1)).param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, others = ({names[id(parameter)] for parameter in group["params"]} for group in (decayed, others))
    layers = {
        f"model.layers.{n}.{name}"
        for n in range(4)
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight")
    }
    recurrent = {
        f"model.layers.{n}.linear_attn.{name}"
        for n in range(3)
        for name in ("A_log", "dt_bias", "norm.weight", "conv1d.weight")
    }
    attention = {f"model.layers.3.self_attn.{name}" for name in ("q_norm.weight", "k_norm.weight", "q_proj.bias")}
    assert others == layers | recurrent | attention | {"model.norm.weight"}
    experts = {f"model.layers.{n}.mlp.experts.{name}" for n in range(4) for name in ("gate_up_proj", "down_proj")}
    assert all(model.get_parameter(name).ndim == 3 for name in experts) and experts <= decayed
    assert decayed | others == set(names.values()) - {names[id(frozen)]} and not decayed & others


def test_a_loss_that_only_one_rank_finds_infinite_is_skipped_on_all(tmp_path):
    """Its gradient, and so the norm over all ranks, is finite."""
    overrides = ["steps=3", "batch_size=4", "evaluation.prompts=0", "checkpoint.every=0", "checkpoint.export=false"]
    fault = "infinite_loss_on_the_last_rank"
    (run,) = run_jobs(tmp_path / "jobs", overrides, nproc=2, recipe="sft", fault=fault)
    assert run.returncode == 0, run.output
    said = sorted(re.findall(r"optimizer step (\d) on rank (\d): taken (\w+), unchanged (\w+)", run.output))
    assert said == [(str(n), str(r), str(n != 2), str(n == 2)) for n in (1, 2, 3) for r in (0, 1)], run.output
    assert [record.get("skipped_updates", 0) for record in run.records] == [0, 1, 0]
    assert run.output.count("step 2: the loss of prompts [") >= 1
