"""Tiny models with a vocabulary of several chunks, a micro-batch of theirs, and what their own logits say of it."""

from types import SimpleNamespace

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from posttrain.models import gdn_packing
from posttrain.models.architectures import default_config
from posttrain.models.shrink import shrunk, slow_to_forget

VOCABULARY = 300  # three chunks of the least width


def assert_close(found, wanted, relative):
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        assert (one.double() - other.double()).abs().max() <= relative * max(other.abs().max(), 1e-30)


def small(model_type, **fields):
    """A tiny model of `model_type` in fp32, fields of its config set."""
    config = shrunk(default_config(model_type))
    for name, value in fields.items():
        assert hasattr(config, name), name
        setattr(config, name, value)
    config.vocab_size = VOCABULARY
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._from_config(config, dtype=torch.float32)
    gdn_packing.patch(model, packed=False)
    return slow_to_forget(model).eval()  # no dropout


def row_of(vocabulary=VOCABULARY, seed=0):
    ids = torch.randint(2, vocabulary, (2, 12), generator=torch.Generator().manual_seed(seed))
    kept = torch.tensor([2, 3, 7, 10])
    inputs = {"input_ids": ids, "logits_to_keep": kept, "use_cache": False}
    return SimpleNamespace(model_inputs=lambda: dict(inputs), kept_K=kept, targets_BK=ids[:, kept + 1])


def of_own_logits(model, row):
    """Logprobs and entropies at temperature 0.6, in fp64."""
    logits = model(input_ids=row.model_inputs()["input_ids"], use_cache=False).logits[:, row.kept_K]
    p = torch.distributions.Categorical(logits=logits.double() / 0.6)
    return p.log_prob(row.targets_BK), p.entropy()


def gradients_of(model, values, weights):
    sum((value * weight).sum() for value, weight in zip(values, weights, strict=True)).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found
