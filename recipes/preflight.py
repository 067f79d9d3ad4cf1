"""What can be known of a run before it is paid for. It takes any option of grpo.py.

    python recipes/preflight.py model.path=Qwen/Qwen3.5-4B task=gsm8k
    python recipes/preflight.py model.path=... launch.nproc=8 memory_gb=80
    python recipes/preflight.py task=jsonl task.path=mine.jsonl --json

Nothing is trained. Exit status 0: the run will start. 1: it will, and something is
worth a look. 2: it would be refused, or could not end; each refusal says what to type.
"""

from posttrain.command.cli import main

if __name__ == "__main__":
    # Starts one rank, which imports this file again, and calls train().
    main(__file__)

import json
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.command.launch import visible_gpus
from posttrain.config import PackingMode, PreflightConf
from posttrain.flops import size
from posttrain.models import gdn_packing
from posttrain.models.loading import (
    compute_dtype,
    describe,
    embedded_tokens,
    end_token_ids,
    load_checkpoint,
    load_tokenizer,
)
from posttrain.packing import document_cost, longest, short_of_room
from posttrain.preflight import memory
from posttrain.preflight.exported import export_and_reload
from posttrain.preflight.plan import largest_step
from posttrain.preflight.report import Part, Report
from posttrain.rollout.probe import verify_sampler
from posttrain.tasks import Task, batch, make_task
from posttrain.tasks.references import score_answers
from posttrain.tracking.files import merge_summary
from posttrain.training.policy import longest_row, small_copy

SHOWN = 5  # prompts


def train(cfg: PreflightConf, run_dir: Path) -> None:
    report, ranks = Report(cfg.json), ranks_of(cfg)
    model = tokenizer = task = None

    # ---- Model and task.
    # The task is looked at without a model too: one mistake must not hide the next.
    with report.part("model") as part:
        part.lines.append(f"{describe(cfg.model)}, {fits_here(cfg):,} parameters")
        loaded = load_checkpoint(cfg.model)
        model, tokenizer = loaded.model, loaded.tokenizer
        part.lines += loaded.notes
        part.lines += look_at_model(model, tokenizer)
    with report.part("task") as part:
        embedded = embedded_tokens(model) if model else None
        tokenizer_of_task = tokenizer or load_tokenizer(cfg.model)
        task = make_task(cfg.task, tokenizer_of_task, embedded, cfg.reward)
        look_at_task(task, part)
    if task:
        with report.part("answers") as part:
            look_at_answers(task, cfg, part)

    # ---- Proofs.
    # By behaviour, on a small copy of the model's layers.
    if model:
        with report.part("packing") as part:
            prove_packing(model, cfg, part)
        with report.part("sampler") as part:
            prove_sampler(model, cfg, part)
        with report.part("FLOPs") as part:
            try:
                cost = size(model).forward_cost
            except ValueError as error:
                part.warnings.append(f"there will be no MFU: {error}")
            else:
                part.lines.append(f"{cost((1024,), 0) / 1024:.3g} a token, forward")

    # ---- Before money is spent.
    if model and task:
        with report.part("step") as part:
            room = cfg.rollout.max_new_tokens
            part.warnings += short_of_room(task.train, room, longest(model))
            problems = batch(task.train, cfg.prompts_per_step, 0, cfg.seed)
            step = largest_step(problems, cfg, ranks, document_cost(model))
            part.lines.append(step.in_words(ranks))
            part.facts |= {name: getattr(step, name) for name in step.__slots__}
        with report.part("memory") as part:
            look_at_memory(model, cfg, ranks, part)
        with report.part("export") as part:
            texts = [str(problem.prompt) for problem in task.train[:SHOWN]]
            changed = export_and_reload(model, tokenizer, cfg.model, texts)
            part.refusals += changed
            if not changed:
                part.lines.append("weights, tokenizer and end tokens come back equal")

    verdict = report.close(run_dir / "preflight.json")
    merge_summary(run_dir, status="completed", exit_status=int(verdict))


def ranks_of(cfg: PreflightConf) -> int:
    """As many as the run would have."""
    given = cfg.launch.nproc
    return given if isinstance(given, int) else visible_gpus() or 1


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def longest_run(cfg: PreflightConf) -> int:
    """Tokens of the longest document that the run can make."""
    return cfg.task.max_prompt_tokens + cfg.rollout.max_new_tokens


def fits_here(cfg: PreflightConf) -> int:
    """The number of parameters. Raises UserError if they do not fit this machine."""
    return memory.parameters_that_fit(cfg.model)


def look_at_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> list[str]:
    kinds = {type(module).__name__ for module in model.modules()}
    layers = sorted(kind for kind in kinds if kind.endswith("DecoderLayer"))
    ends = tokenizer.convert_ids_to_tokens(sorted(end_token_ids(model, tokenizer)))
    return [f"{type(model).__name__} of {', '.join(layers)}", f"ends with {ends}"]


def look_at_task(task: Task, part: Part) -> None:
    """The template at work on the first prompts, and what was left out."""
    part.lines += [f"{len(task.train):,} train, {len(task.heldout):,} heldout"]
    part.lines += [f"dropped, {why}: {n:,}" for why, n in task.dropped.items()]
    part.lines += task.template.in_words()
    part.warnings += task.template.warnings
    for problem in task.train[:SHOWN]:
        prompt = str(problem.prompt)[:60].replace("\n", " ")
        part.lines.append(f"{len(problem.prompt_ids):>6} tokens  {prompt}")
    part.facts["dropped"] = dict(task.dropped)
    part.facts["first_prompt"] = task.template.rendered


def look_at_answers(task: Task, cfg: PreflightConf, part: Part) -> None:
    """References must score 1, and answers of other problems must not."""
    scores = score_answers(task, cfg.task)
    part.lines.append(f"{scores.right} of {scores.tried} reference answers score 1")
    part.warnings += scores.warnings()


def prove_packing(model: PreTrainedModel, cfg: PreflightConf, part: Part) -> None:
    """As a run does at its start."""
    packed, dtype = cfg.packing.mode is PackingMode.thd, compute_dtype(cfg.model)
    kernels = gdn_packing.patch(model, device(), packed=packed).kernels
    part.lines.append(", ".join(f"{what}: {name}" for what, name in kernels.items()))
    part.facts["kernels"] = kernels
    proof = gdn_packing.verify(model, device(), dtype, longest_row(cfg), packed)
    part.lines.append(
        f"{cfg.packing.mode}: documents agree to {proof.max_difference:.1e} "
        f"(allowed {proof.tolerance:.0e})"
    )
    part.warnings += proof.warnings


def prove_sampler(model: PreTrainedModel, cfg: PreflightConf, part: Part) -> None:
    """As a run does at its start."""
    small = small_copy(model, cfg, device(), compute_dtype(cfg.model))
    if small is None:
        part.warnings.append("no small copy can be made of this model: not proved")
        return
    proof = verify_sampler(small, cfg.rollout)
    part.lines.append(
        f"logprobs are the model's to {proof.max_difference:.1e} nats "
        f"(allowed {proof.tolerance:.0e})"
    )


def look_at_memory(
    model: PreTrainedModel, cfg: PreflightConf, ranks: int, part: Part
) -> None:
    """What one rank holds in each phase, beside the memory of its device."""
    width = compute_dtype(cfg.model).itemsize
    phases = memory.of_a_rank(model, cfg, ranks, width, longest_run(cfg))
    limit = cfg.memory_gb * 1e9 if cfg.memory_gb else memory.of_this_device()
    for phase, holds in phases.items():
        total = sum(holds.values())
        most = sorted(holds, key=holds.__getitem__, reverse=True)[:3]
        largest = ", ".join(f"{what} {holds[what] / 1e9:.2f}" for what in most)
        part.lines.append(f"{phase}: {total / 1e9:.2f} GB a rank ({largest})")
        if total > limit:
            part.warnings.append(
                f"{phase} needs about {total / 1e9:.1f} GB a rank, and a device has "
                f"{limit / 1e9:.1f} GB: {memory.way_out(phase, most[0])}"
            )
    part.facts |= json.loads(json.dumps(phases))
