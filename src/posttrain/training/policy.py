"""What is trained and what its use needs: model, tokenizer and optimizer, sharded, its packing patched and proved."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain import packing
from posttrain.config import GRPOConf, JobConf, PackingConf, PackingMode, SFTConf, TrainingConf
from posttrain.errors import UserError
from posttrain.flops import PassCost
from posttrain.logprobs import token_logprobs
from posttrain.models import gdn_packing
from posttrain.models.head import Head, find_head
from posttrain.models.loading import (
    compute_dtype,
    describe,
    embedded_tokens,
    end_token_ids,
    initialise,
    load_checkpoint,
)
from posttrain.models.packed.probe import PackingLeak
from posttrain.models.shrink import tiny_copy
from posttrain.models.thresholds import thresholds
from posttrain.records import Document, MiniBatch, Packed, PackedRow
from posttrain.training import optim
from posttrain.training.fsdp import make_accelerator, sharding


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A model that is ready: to sample from, and where a recipe trains, to train."""

    model: nn.Module  # as accelerate wrapped it
    tokenizer: PreTrainedTokenizerBase
    device: torch.device
    dtype: torch.dtype  # of the computation
    head: Head
    end_ids: frozenset[int]  # tokens that end a completion
    pad_id: int
    vocabulary: int  # tokens that the model has embeddings of
    cost: PassCost  # forward FLOPs of documents
    longest: float  # tokens that the model has positions for
    row_limit: float  # tokens of the longest row that the packing was proved for
    facts: dict[str, Any]  # for the banner and summary.json
    small: PreTrainedModel | None  # a tiny copy of the bare model, for proofs; None where there can be none
    learner: Learner | None  # None: sampled from only

    @property
    def accelerator(self) -> Accelerator:
        return self._learner.accelerator

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._learner.optimizer

    @property
    def _learner(self) -> Learner:
        if self.learner is None:
            raise RuntimeError("this policy was prepared to be sampled from, not to be trained")
        return self.learner

    def logprobs(self, row: PackedRow, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """Logprobs and entropies [B, K] of the row's trained tokens: see `token_logprobs`."""
        return token_logprobs(self.model, row, self._learner.temperature, self.head, entropy_gradient)

    @torch.no_grad()
    def with_logprobs(self, field: str, batches: Sequence[MiniBatch]) -> list[MiniBatch]:
        """The same mini-batches with the logprobs of the weights as they are at this moment in `field` of each row."""

        def computed(packed: Packed) -> Packed:
            rows = []
            for row in packed.rows:
                change: dict[str, Any] = {field: self.logprobs(row)[0]}
                rows.append(dataclasses.replace(row, **change))
            return dataclasses.replace(packed, rows=rows)

        return [batch.each(computed) for batch in batches]

    def pack(self, documents: Sequence[Document], every_token_counts: bool = False, watched: bool = False) -> MiniBatch:
        """One optimizer step's documents, planned over all ranks. Not the ones of weight 0: they do not count.

        A document of advantage 0 has no gradient, unless `every_token_counts`. It counts in the others' weights, and
        is computed only to be `watched`.
        """
        counted = [document for document in documents if document.weight]
        taught = [document for document in counted if document.advantage or every_token_counts]
        others = [document for document in counted if not (document.advantage or every_token_counts)]
        spare = packing.spare(documents[0].rollout)
        where = spare, self._learner.packing, self.cost, self.pad_id, self.device
        return MiniBatch(
            trained=packing.pack(taught, *where),
            watched=packing.pack(others, *where) if watched and others else None,
            left_out=0 if watched else len(others),
            refused=sum(len(document) > self.longest for document in documents),
        )

    def refuse_longer_rows(self, longest_document: int) -> None:
        """Raises UserError where a row is beyond the length up to which documents do not change each other."""
        cfg = self._learner.packing
        packed = cfg.mode is PackingMode.thd
        row = max(longest_document, cfg.tokens_per_row) if packed else longest_document
        if row > self.row_limit:
            budget = f"type packing.tokens_per_row={self.row_limit:.0f} at most, and " * packed
            raise UserError(
                f"packing={cfg.mode} is right for rows of up to {self.row_limit:,.0f} tokens, where this model "
                f"computes something else, and the run makes rows of up to {row:,}: {budget}leave out longer documents"
            )

    def packing_metrics(self, batches: Sequence[MiniBatch]) -> dict[str, float]:
        """See packing.statistics."""
        plans = [batch.trained.plan for batch in batches]
        refused = sum(batch.refused for batch in batches)
        return packing.statistics(plans, self._learner.packing, self.cost, refused)


@dataclass(frozen=True, slots=True, kw_only=True)
class Learner:
    """What only training needs."""

    accelerator: Accelerator
    optimizer: torch.optim.Optimizer
    packing: PackingConf
    temperature: float  # of the distribution that logprobs are of


def prepare(cfg: JobConf) -> Policy:
    """Load the model and choose its kernels; where the recipe trains, prove the packing and shard the model.

    A recipe that only samples has the whole model on each rank, in the dtype of the computation.
    """
    torch.manual_seed(cfg.seed)
    random = isinstance(cfg, SFTConf) and cfg.init
    loaded = (initialise if random else load_checkpoint)(cfg.model)
    model, tokenizer = loaded.model, loaded.tokenizer
    dtype, end_ids = compute_dtype(cfg.model), end_token_ids(model, tokenizer)
    facts: dict[str, Any] = {"model": "random weights" if random else describe(cfg.model)}
    facts["checkpoint"] = list(loaded.notes)

    if isinstance(cfg, TrainingConf):
        accelerator = make_accelerator(cfg.fsdp, model, dtype)
        device = accelerator.device
        facts["packing"], row_limit = _prove_packing(model, cfg, device, dtype)
    else:
        row_limit = math.inf
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        sample_only(model, device, dtype)

    # All of them read the bare model: modules and classes are not what they were once it is sharded.
    vocabulary, small = embedded_tokens(model), small_copy(model, cfg, device, dtype)
    head, cost, longest = find_head(model), packing.document_cost(model), packing.longest(model)
    wrapped, learner = model, None
    if isinstance(cfg, TrainingConf):
        facts["packing"]["kernels"]["logprobs"] = head.description
        wrapped, optimizer = accelerator.prepare(model, optim.make_optimizer(model, cfg.optim))
        temperature = cfg.rollout.temperature if isinstance(cfg, GRPOConf) else 1.0
        learner = Learner(accelerator=accelerator, optimizer=optimizer, packing=cfg.packing, temperature=temperature)
        facts["sharding"] = sharding(wrapped)
    facts |= {"parameters": sum(p.numel() for p in wrapped.parameters()), "device": device.type}
    return Policy(
        model=wrapped,
        tokenizer=tokenizer,
        device=device,
        dtype=dtype,
        head=head,
        end_ids=end_ids,
        pad_id=tokenizer.pad_token_id,
        vocabulary=vocabulary,
        cost=cost,
        longest=longest,
        row_limit=row_limit,
        facts=facts,
        small=small,
        learner=learner,
    )


def _prove_packing(
    model: PreTrainedModel, cfg: TrainingConf, device: torch.device, dtype: torch.dtype
) -> tuple[dict[str, Any], float]:
    """Patch the layers; what the probe found, or which kernels run, and the longest row that is right.

    Documents of one row must not see each other, also not through the recurrent state of Gated DeltaNet layers. The
    probe shows that they do not, or raises PackingLeak.
    """
    packed, longest, limit = cfg.packing.mode is PackingMode.thd, longest_row(cfg), math.inf
    kernels = gdn_packing.patch(model, device, packed=packed)
    proof = None
    if cfg.packing.verify:
        try:
            proof = gdn_packing.verify(model, device, dtype, longest, packed)
        except PackingLeak:
            if longest is not None:
                raise
            # Fine-tuning knows its longest document when it has read its data: `refuse_longer_rows` compares.
            proof = gdn_packing.verify(model, device, dtype, 0, packed)
            limit = min(thresholds(model.config.get_text_config(decoder=True)).values())
    return {"mode": cfg.packing.mode, "verified": bool(proof), **dataclasses.asdict(proof or kernels)}, limit


def longest_row(cfg: TrainingConf) -> float | None:
    """Tokens of the longest row (thd) or document (padded) that the run can make; None: answers have any length."""
    if not isinstance(cfg, GRPOConf):
        return None
    document = cfg.task.max_prompt_tokens + cfg.rollout.max_new_tokens
    return max(document, cfg.packing.tokens_per_row) if cfg.packing.mode is PackingMode.thd else document


def small_copy(
    model: PreTrainedModel, cfg: JobConf, device: torch.device, dtype: torch.dtype
) -> PreTrainedModel | None:
    """The tiny copy; if samples can be longer than a length at which the model changes, it changes within the proof."""
    limits = thresholds(model.config.get_text_config(decoder=True)).values()
    longest = cfg.task.max_prompt_tokens + cfg.rollout.max_new_tokens
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        small = tiny_copy(model, device, dtype, crossing=any(longest > tokens for tokens in limits))
    return None if small is None else small.eval()


def sample_only(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> None:
    """Make `model` ready on `device`, with parameters in `dtype` and the kernels of the policy."""
    # Buffers stay as they are: rotary frequencies need fp32.
    nn.Module.to(model, device)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    gdn_packing.patch(model, device, packed=False)
