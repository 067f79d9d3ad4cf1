"""The sharding strategies side by side on four real ranks, and what the wrapped model says of itself."""

import pytest
import torch
import torch.distributed as dist
from jobs import run_jobs
from ranks import on_ranks
from reference_grpo import reference
from torch.distributed.fsdp import FSDPModule

from posttrain.config import Architecture, FSDPConf, ModelConf, OptimConf, Strategy
from posttrain.models import gdn_packing
from posttrain.models.loading import load
from posttrain.training.fsdp import from_all_ranks, gathered, make_accelerator, reduce_over_ranks, sharding
from posttrain.training.optim import make_optimizer


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    """Three prompts on four ranks: one rank has nothing to sample and still takes part in every collective."""
    same = ["steps=3", "prompts_per_step=3", "packing.tokens_per_row=12"]
    jobs = [[f"fsdp={strategy}", *same] for strategy in Strategy]
    return dict(zip(Strategy, run_jobs(tmp_path_factory.mktemp("four") / "jobs", *jobs, nproc=4), strict=True))


@pytest.mark.parametrize("strategy", Strategy)
def test_a_strategy_is_what_the_wrapped_model_says_and_trains_as_one_process_does(four_ranks, strategy):
    run, rows = four_ranks[strategy], reference(steps=3, prompts=3)
    assert run.returncode == 0, run.output
    assert (run.summary["sharding"], run.summary["world_size"]) == (strategy, 4)
    assert run.summary["status"] == "completed"
    assert [record["loss"] for record in run.training] == pytest.approx([row["loss"] for row in rows], abs=1e-4)
    norms = [record["grad_norm"] for record in run.training]
    assert norms == pytest.approx([row["grad_norm"] for row in rows], rel=1e-3)
    assert max(record["packing/micro_batches"] for record in run.training) > 1


def check_the_wrapped_model() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    assert world == 2
    model, _ = load(ModelConf(architecture=Architecture.qwen3_5_moe))
    gdn_packing.patch(model)
    whole = {name: p.detach().clone() for name, p in model.named_parameters()}
    ids = torch.arange(1, 30)[None]
    logits = model(input_ids=ids, use_cache=False).logits
    accelerator = make_accelerator(FSDPConf(strategy=Strategy.full_shard), model, torch.float32)
    model, _ = accelerator.prepare(model, make_optimizer(model, OptimConf()))
    assert isinstance(model, FSDPModule) and accelerator.is_fsdp2 and sharding(model) == "full_shard"
    layers = [m for m in model.modules() if type(m).__name__.endswith("DecoderLayer")]
    assert len(layers) == 4 and all(isinstance(m, FSDPModule) for m in layers)
    assert sum(p.to_local().numel() for p in model.parameters()) < 0.6 * sum(p.numel() for p in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight  # tied before, tied after

    for _ in range(2):
        with gathered(model) as bare:
            for _ in range(1 + rank):  # ranks may run different numbers of forwards inside
                inside = bare(input_ids=ids, use_cache=False).logits
        assert torch.allclose(inside, logits, atol=1e-5)
        assert sharding(model) == "full_shard"  # and is as it was
        assert all(not isinstance(p, torch.nn.Parameter) or hasattr(p, "to_local") for p in model.parameters())
        model(input_ids=ids, use_cache=False).logits.sum().backward()
        model.zero_grad()
    for name, p in model.named_parameters():
        assert torch.equal(p.full_tensor(), whole[name]), name

    assert from_all_ranks([rank] * rank) == [1]
    assert reduce_over_ranks({"b": torch.tensor(rank + 1.0), "a": torch.tensor(2.0)}, dist.ReduceOp.SUM) == {
        "a": 4,
        "b": 3,
    }
    dist.barrier()
    print("checked")


def test_the_wrapped_model_on_two_ranks():
    ended = on_ranks(2, check_the_wrapped_model)
    assert ended.status == 0 and ended.output.count("checked") == 2, ended.output
