"""The sharding strategies side by side on four real ranks, as one sweep, and what the wrapped model says of itself."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT, SMALL, command
from reference_grpo import reference

STRATEGIES = ["full_shard", "shard_grad_op", "hybrid_shard", "no_shard"]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Three prompts on four ranks: one rank has nothing to sample and still takes part in every collective."""
    directory = tmp_path_factory.mktemp("sweep") / "sweep"
    process = command(
        "grpo",
        *SMALL,
        "-m",
        f"fsdp={','.join(STRATEGIES)}",
        "launch.nproc=4",
        "steps=3",
        "prompts_per_step=3",
        "packing.tokens_per_row=12",
        f"hydra.sweep.dir={directory}",
        timeout=280,
    )
    assert process.returncode == 0, process.stdout
    return {path.parent.name: path.parent for path in directory.glob("*/summary.json")}


def test_four_run_directories_name_four_strategies(sweep):
    summaries = {name: json.loads((path / "summary.json").read_text()) for name, path in sweep.items()}
    assert len(summaries) == 4
    assert sorted(summary["sharding"] for summary in summaries.values()) == sorted(STRATEGIES)
    for name, summary in summaries.items():
        assert summary["sharding"] in name and summary["world_size"] == 4 and summary["status"] == "completed"


def test_their_losses_agree_with_one_process(sweep):
    rows = reference(steps=3, prompts=3)
    for path in sweep.values():
        records = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        records = [record for record in records if "loss" in record]
        assert [record["loss"] for record in records] == pytest.approx([row["loss"] for row in rows], abs=1e-4), path
        norms = [record["grad_norm"] for record in records]
        assert norms == pytest.approx([row["grad_norm"] for row in rows], rel=1e-3), path
        assert max(record["packing/micro_batches"] for record in records) > 1


CHECK = """
import torch, torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from posttrain.config import Architecture, FSDPConf, ModelConf
from posttrain.training.fsdp import from_all_ranks, gathered, make_accelerator, reduce_over_ranks, sharding
from posttrain.models import gdn_packing
from posttrain.models.loading import load
from posttrain.training.optim import make_optimizer
from posttrain.config import OptimConf, Strategy
from posttrain.command.rank import start_process_group

start_process_group(60)
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
assert reduce_over_ranks({"b": torch.tensor(rank + 1.0), "a": torch.tensor(2.0)}, dist.ReduceOp.SUM) == {"a": 4, "b": 3}
dist.barrier()
print("checked", flush=True)
import os; os._exit(0)
"""


def test_the_wrapped_model_on_two_ranks(tmp_path):
    script = tmp_path / "check.py"
    script.write_text(CHECK)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    process = subprocess.run(launcher, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert process.returncode == 0 and process.stdout.count("checked") == 2, process.stdout + process.stderr
