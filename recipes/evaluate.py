"""Measure a model on a task's held-out problems, without training.

python recipes/evaluate.py model=qwen3_5_dense model.path=outputs/grpo/<run>/model evaluation.prompts=256
"""

from posttrain.cli import main

if __name__ == "__main__":
    main(__file__)  # reads the config, makes the run directory and starts the ranks, which import this file again

import dataclasses
import time
from pathlib import Path

import torch
import torch.distributed as dist

from posttrain.config import EvaluateConf, LoggerConf, LoggerName
from posttrain.data.tasks import make_task
from posttrain.evaluation import evaluate
from posttrain.models import gdn_packing
from posttrain.models.loading import compute_dtype, describe, end_token_ids, load
from posttrain.tracking import Tracker


def train(cfg: EvaluateConf, run_dir: Path) -> None:
    model, tokenizer = load(cfg.model)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    model = model.to(device)
    for parameter in model.parameters():  # not the buffers: rotary frequencies stay fp32
        parameter.data = parameter.data.to(compute_dtype(cfg.model))
    gdn_packing.patch(model, device, packed=False)  # kernels follow the device
    task = make_task(cfg.task, tokenizer)
    logger = LoggerConf(name=LoggerName.none)
    with Tracker(run_dir, logger, dist.get_rank() == 0, dataclasses.asdict(cfg), total_steps=0) as tracker:
        tracker.start(
            {
                "model": describe(cfg.model),
                "parameters": sum(p.numel() for p in model.parameters()),
                "world_size": dist.get_world_size(),
                "device": device.type,
                "task": {"heldout": len(task.heldout), "dropped": task.dropped},
            }
        )
        began = time.perf_counter()
        held_out = evaluate(model, task, tokenizer, cfg, end_token_ids(model, tokenizer))
        tracker.log(0, held_out | {"time/evaluation": time.perf_counter() - began})
        tracker.summary(evaluation=held_out)
