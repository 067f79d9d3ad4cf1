"""The sampler's proof at start: do padded and cached sampling report the model's own logprobs?

A prompt beside a longer one is padded on the left, and each token is decoded with a cache. Not every architecture gives
the same logits then as for the whole sequence by itself: padding shifts positions, or runs through a state; cached keys
were rotated for shorter sequences. The loss would compare with logprobs of another distribution.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from posttrain.config import JobConf, RolloutConf, SamplingConf
from posttrain.errors import UserError
from posttrain.records import Problem, Rollout
from posttrain.rollout.local import generate
from posttrain.training.policy import Policy

# Tokens. The first batch is short and grows past windows and thresholds of tiny models, the second begins past them.
PROMPTS, TOGETHER, NEW = (3, 12, 9, 70, 34, 5), 3, 40
SAMPLES = 2  # of each prompt
# Nats. Rounding stays under 2e-5 in fp32; a wrong position, or a state that runs through padding, is at least 0.05.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.05}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerProof:
    """What was found. Differences are of logprobs, in nats, the largest over all tokens."""

    max_difference: float
    tolerance: float
    padded: bool  # prompts of different lengths in one batch; else one prompt a batch
    seconds: float


def verify_sampler(model: PreTrainedModel, cfg: SamplingConf) -> SamplerProof:
    """Sample from `model`, a tiny copy of the one to be proved, as the run will, and compare with plain forwards.

    Errors: UserError, one line with the way out, where the logprobs are not the model's.
    """
    began, name = time.perf_counter(), type(model).__name__
    dtype = next(model.parameters()).dtype
    # An evaluation decodes one sample of each prompt, so that any larger batch has several prompts.
    padded = cfg.batch_size > 1
    difference = reported(model, padded)
    if not isinstance(difference, float) or not difference <= TOLERANCE[dtype]:
        found = difference if isinstance(difference, str) else f"logprobs are off by {difference:.2g} nats"
        if padded and isinstance(alone := reported(model, False), float) and alone <= TOLERANCE[dtype]:
            raise UserError(
                f"{name} cannot sample prompts of different lengths in one batch: {found}. "
                "One prompt a batch is right: type rollout.batch_size=1"
            )
        raise UserError(f"{name} cannot be sampled from with a cache: {found}. Take another model")
    return SamplerProof(
        max_difference=difference, tolerance=TOLERANCE[dtype], padded=padded, seconds=time.perf_counter() - began
    )


def prove_sampler(policy: Policy, cfg: JobConf) -> dict[str, Any]:
    """The proof for a run, as facts for its banner and summary. Raises UserError, see `verify_sampler`."""
    if not cfg.rollout.verify or policy.small is None:
        why = "rollout.verify=false" if not cfg.rollout.verify else "the model has no small copy"
        return {"verified": False, "reason": why}
    return {"verified": True, **asdict(verify_sampler(policy.small, cfg.rollout))}


@torch.no_grad()
def reported(model: PreTrainedModel, padded: bool) -> float | str:
    """The largest difference of the sampler's logprobs from those of each sequence by itself; why there is none."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    numbers = torch.Generator().manual_seed(0)
    prompts = [torch.randint(2, vocabulary, (length,), generator=numbers).tolist() for length in PROMPTS]
    problems = [
        (place, Problem(task="", index=place, prompt="", prompt_ids=tuple(ids), answer=""))
        for place, ids in enumerate(prompts)
    ]
    batch = SAMPLES * (TOGETHER if padded else 1)
    conf = RolloutConf(group_size=SAMPLES, max_new_tokens=NEW, batch_size=batch)
    was_training = model.training
    try:
        # A few sequences end before the others: they leave the batch.
        rollouts = generate(model, problems, conf, key=(2, 0, 0), end_ids={1}, pad_id=0)
        return max(float((_own(model, rollout) - _said(rollout)).abs().max()) for rollout in rollouts)
    # Whatever an architecture raises that cannot be called so.
    except Exception as error:
        if "past_key_values" in str(error):
            return "it returns no cache that the sampler knows"
        return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}".rstrip(".: ")
    finally:
        model.train(was_training)


def _said(rollout: Rollout) -> Tensor:
    """Logprobs [K] of the completion's tokens, by the sampler."""
    return torch.tensor(_of_completion(rollout.logprobs, rollout), dtype=torch.float64)


def _own(model: PreTrainedModel, rollout: Rollout) -> Tensor:
    """Logprobs [K] of the same tokens: one forward of the whole sequence, without cache, mask or positions."""
    ids_BT = torch.tensor([rollout.ids], device=model.device)
    logprobs_TV = model(input_ids=ids_BT, use_cache=False).logits[0, :-1].double().log_softmax(-1)
    logprobs_T = logprobs_TV.gather(-1, ids_BT[0, 1:, None]).squeeze(-1).cpu()
    return logprobs_T[len(rollout) - 1 - rollout.written_tokens :]


def _of_completion(values: Sequence[float], rollout: Rollout) -> Sequence[float]:
    return values[len(rollout) - rollout.written_tokens :]
