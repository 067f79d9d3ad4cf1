"""The home of every value: its type, its default and its meaning, a line a value.

A file of conf/ states only what its option changes: values that differ from the default here, follow from other values
(`${when_embedded:...}`, `${task.max_new_tokens}`), or have none here (MISSING).

Plain dataclasses: no torch and no Hydra, so that `--help` is instant and a rank can read a job without composing it.
`command/cli.py` turns the command line into one of these, `rules.py` checks what spans fields. A recipe
`recipes/<name>.py` takes the root dataclass `RECIPES["<name>"]`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from enum import StrEnum

from posttrain.config.algorithm import AlgorithmConf
from posttrain.config.reward import RewardConf
from posttrain.config.task import MISSING, TaskConf


class Architecture(StrEnum):
    """`auto` takes any causal language model; every other value also checks that the weights are of it."""

    auto = "auto"
    qwen3_5_dense = "qwen3_5_dense"
    qwen3_5_moe = "qwen3_5_moe"
    qwen3_next = "qwen3_next"
    qwen3_dense = "qwen3_dense"


class Dtype(StrEnum):
    """The dtype of the computation. Master weights and optimizer state are always fp32."""

    auto = "auto"  # bf16 on a GPU that has it, fp32 on a CPU
    bf16 = "bf16"
    fp32 = "fp32"


class PackingMode(StrEnum):
    thd = "thd"  # documents end to end in one row [1, T], with boundaries
    padded = "padded"  # one document a row, right-padded [B, T]


class Strategy(StrEnum):
    full_shard = "full_shard"  # FSDP2, parameters freed after forward
    shard_grad_op = "shard_grad_op"  # FSDP2, parameters kept until after backward
    hybrid_shard = "hybrid_shard"  # FSDP2, sharded in groups of shard_size, replicated over groups
    no_shard = "no_shard"  # DDP


SamplerName = StrEnum("SamplerName", "local")
MetricsName = StrEnum("MetricsName", "mfu none")
LoggerName = StrEnum("LoggerName", "none wandb")
WandbMode = StrEnum("WandbMode", "online offline")
Schedule = StrEnum("Schedule", "constant linear cosine")


@dataclass
class ModelConf:
    architecture: Architecture = MISSING  # what the weights must be; auto: any causal language model
    path: str | None = None  # hub name or local directory; null: the embedded tiny model of the architecture
    revision: str | None = None  # hub branch, tag or commit
    trust_remote_code: bool = False  # run Python code that comes with the weights
    dtype: Dtype = Dtype.auto  # of the computation; auto: bf16 on a GPU that has it, else fp32. Master weights are fp32
    attention: str = "auto"  # transformers' attn_implementation; auto: flash_attention_2 if it can run, else sdpa
    gradient_checkpointing: bool = False  # recompute activations in backward: less memory, a third more time


@dataclass
class PackingConf:
    mode: PackingMode = MISSING  # how documents fill a micro-batch
    tokens_per_row: int = 4096  # budget of a micro-batch: its activations take memory. A longer document has its own
    pad_multiple: int = 1  # each row's length is rounded up to a multiple of this, by one padding document
    verify: bool = True  # prove at start, on a small copy of the layers, that documents do not leak


@dataclass
class FSDPConf:
    strategy: Strategy = MISSING  # how parameters, gradients and optimizer state lie on the ranks
    shard_size: int | None = None  # ranks a shard group, hybrid_shard only; null: a node's, or half of all


@dataclass
class MetricsConf:
    name: MetricsName = MISSING  # mfu: model FLOPs utilisation, counted from the model's own modules
    peak_tflops: float | None = None  # dense peak of one device in TFLOP/s; null: from the device's name


@dataclass
class TokenMetricsConf(MetricsConf):
    full_every: int = 10  # steps between those whose token metrics cover completions without a gradient too; 0: none


@dataclass
class SamplingConf:
    top_p: float = 1.0  # the least probable tokens, beyond this sum of probabilities, are not sampled; 1: all are
    max_new_tokens: int = 256  # the longest completion; conf/ lets it follow task.max_new_tokens
    verify: bool = True  # prove at start, on a small copy of the model, that what is sampled has the model's logprobs
    batch_size: int = 256  # sequences decoded together on one rank, but at least one prompt's group


@dataclass
class RolloutConf(SamplingConf):
    name: SamplerName = SamplerName.local  # local: the training model samples, in the same process
    group_size: int = 8  # completions a prompt
    temperature: float = 1.0  # logits are divided by this, in the sampler and in training
    max_staleness: int = 0  # steps that sampling is ahead of training, at most; never beyond a checkpoint


@dataclass
class OptimConf:
    """AdamW on fp32 master weights."""

    lr: float = 1e-6  # the learning rate, after warmup
    betas: list[float] = field(default_factory=lambda: [0.9, 0.99])  # decay of the gradient's two averages, a step
    weight_decay: float = 0.0  # on matrices only
    max_grad_norm: float = 1.0  # gradients are scaled down to this norm; inf: never
    max_skipped: int = 5  # so many updates in a row whose loss or gradient is not finite stop the run
    schedule: Schedule = Schedule.constant  # of the learning rate after warmup; linear and cosine near 0 at the end
    warmup_steps: int = 10  # steps in which the learning rate grows from 0; 0: none


@dataclass
class LoggerConf:
    name: LoggerName = MISSING  # where metrics go besides the run directory
    project: str = "posttrain"  # of Weights & Biases
    run_name: str | None = None  # null: the run directory's name
    mode: WandbMode = WandbMode.online  # of wandb; offline: `wandb sync` later


@dataclass
class LaunchConf:
    nproc: int | str = "auto"  # ranks on this machine; auto: one a GPU, 1 on a CPU
    threads: int | str = "auto"  # torch threads a rank; auto: OMP_NUM_THREADS, or cores / ranks
    timeout_s: float = 600.0  # a collective that waits longer than this fails the run
    grace_s: float = 60.0  # after SIGTERM or SIGUSR1 a run has this long to write a checkpoint
    requeue: bool = False  # a run that was preempted ends with exit status 0 instead of 143


@dataclass
class CheckpointConf:
    every: int = 100  # steps between checkpoints, and one after the last step; 0: none
    keep_last: int = 2  # newest checkpoints kept; 0: all
    keep_every: int = 0  # checkpoints of steps that are multiples of this are kept as well; 0: none
    best: bool | str = False  # the checkpoint of the best evaluation.metric is kept as well; or the metric's name
    asynchronous: bool = True  # training goes on while a copy of the state, in CPU memory, is written
    export: bool = True  # write the trained model to <run directory>/model at the end


@dataclass
class EvaluationConf:
    prompts: int = 128  # held-out prompts; 0, in training: no evaluation
    temperature: float = 0.0  # of the evaluation's sampling; 0: greedy
    samples: int = 1  # completions of each prompt; more: pass@k and maj@k, at a temperature above 0
    by: str | None = None  # column of the rows, such as level, whose values have metrics of their own; task: by task


@dataclass
class PeriodicEvaluationConf(EvaluationConf):
    every: int = 0  # also every so many steps; 0: at the end only
    metric: str = "eval/reward"  # what the best checkpoint and an early end are judged by; more is better
    patience: int = 0  # evaluations without a better one after which the run ends; 0: it goes to its last step


@dataclass
class JobConf:
    """What every recipe has, and all that evaluate needs."""

    model: ModelConf = field(default_factory=ModelConf)
    task: TaskConf = field(default_factory=TaskConf)
    reward: RewardConf = field(default_factory=RewardConf)
    rollout: SamplingConf = field(default_factory=SamplingConf)
    launch: LaunchConf = field(default_factory=LaunchConf)
    evaluation: EvaluationConf = field(default_factory=EvaluationConf)
    seed: int = 0  # of weights, batches and samples
    debug: bool = False  # show Python tracebacks for every error


@dataclass
class TrainingConf(JobConf):
    """What every recipe has that trains."""

    evaluation: PeriodicEvaluationConf = field(default_factory=PeriodicEvaluationConf)
    packing: PackingConf = field(default_factory=PackingConf)
    fsdp: FSDPConf = field(default_factory=FSDPConf)
    optim: OptimConf = field(default_factory=OptimConf)
    metrics: MetricsConf = field(default_factory=MetricsConf)
    logger: LoggerConf = field(default_factory=LoggerConf)
    checkpoint: CheckpointConf = field(default_factory=CheckpointConf)
    steps: int = 200  # optimizer steps
    strict: bool = False  # what is suspicious in the first step ends the run with exit status 1
    resume: str | None = None  # auto: the newest checkpoint in this hydra.run.dir; or a run or checkpoint directory


@dataclass
class SFTConf(TrainingConf):
    batch_size: int = 64  # documents an optimizer step, over all ranks
    init: bool = False  # start from random weights instead of the checkpoint's
    stop_at: float | None = None  # end early once an evaluation's eval/rewards/correct reaches this


@dataclass
class GRPOConf(TrainingConf):
    rollout: RolloutConf = field(default_factory=RolloutConf)
    metrics: TokenMetricsConf = field(default_factory=TokenMetricsConf)
    algorithm: AlgorithmConf = field(default_factory=AlgorithmConf)
    steps: int = 350  # rollouts; each is one optimizer step, or algorithm.updates_per_rollout x mini_batches
    prompts_per_step: int = 32  # over all ranks, any number; each prompt gets rollout.group_size completions


@dataclass
class PreflightConf(GRPOConf):
    json: bool = False  # print the report as JSON; --json does the same
    memory_gb: float | None = None  # of one device, to compare the estimate with; null: of this machine's


EvaluateConf = JobConf
RECIPES = {"grpo": GRPOConf, "sft": SFTConf, "evaluate": EvaluateConf, "preflight": PreflightConf}


def hybrid_shard_size(cfg: FSDPConf, world: int) -> int:
    """Ranks a shard group: cfg.shard_size, or a node's ranks if there are several nodes, or half of all."""
    node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    return cfg.shard_size or (node if 1 < node < world else world // 2)
