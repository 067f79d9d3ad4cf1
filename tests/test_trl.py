"""Loss and gradient of TRL's own trainers against ours: same logits, masks and rewards.

TRL has an environment of its own, in which this file runs as a script: it makes a GRPOTrainer or RLOOTrainer with the
arguments of each case, lets it score given completions and compute its loss on a model whose logits are given, and does
the same with `advantages`, `token_weights` and `policy_terms`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from posttrain.config.algorithm import (
    AdvantageScale,
    Aggregation,
    AlgorithmConf,
    Baseline,
    CorrectionConf,
    CorrectionLevel,
    CorrectionMode,
    KLConf,
    OverlongConf,
    Ratio,
    Surrogate,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

VERSION = "1.16.0"
LENGTHS = [1, 50, 7, 12, 50, 3, 1, 20]  # of two groups of four
REWARDS = [1.0, 0.75, 0.0, 0.25, -1.0, 2.0, 0.0, 1.0]
LONGEST, TEMPERATURE, VOCABULARY, PROMPT = 50, 0.7, 16, 3

TOKEN_MEAN = dict(aggregation=Aggregation.token_mean)
GSPO = dict(ratio=Ratio.sequence_mean, clip_low=3e-4, clip_high=4e-4)
TRL_GSPO = dict(importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4)
SAPO = dict(surrogate=Surrogate.sapo, sapo_tau_positive=1.0, sapo_tau_negative=1.05, clip_low=None, clip_high=None)
CISPO = dict(surrogate=Surrogate.cispo, clip_low=None, clip_high=4.0)


def corrected(level, mode, cap=3.0, floor=0.0):
    return dict(
        correction=CorrectionConf(level=CorrectionLevel(level), mode=CorrectionMode(mode), cap=cap, floor=floor)
    )


def sampler(mode, **bounds):
    """With logprobs of another sampler than the trainer, as vLLM gives them."""
    limits = {f"vllm_importance_sampling_clip_{side}": value for side, value in bounds.items()}
    return dict(loss_type="grpo", vllm_importance_sampling_mode=mode, **limits)


# name: TRL's arguments, ours
CASES = {
    "grpo": (dict(loss_type="grpo"), {}),
    "dr_grpo": (
        dict(loss_type="dr_grpo", scale_rewards="none"),
        dict(advantage_scale=AdvantageScale.none, aggregation=Aggregation.seq_mean_token_sum_norm),
    ),
    "dapo": (dict(loss_type="dapo", epsilon_high=0.28), dict(clip_high=0.28, **TOKEN_MEAN)),
    "bnpo": (dict(loss_type="bnpo"), TOKEN_MEAN),
    "batch deviation": (dict(loss_type="grpo", scale_rewards="batch"), dict(advantage_scale=AdvantageScale.batch)),
    "gspo": (dict(loss_type="grpo", **TRL_GSPO), GSPO),
    "gspo, dapo": (dict(loss_type="dapo", **TRL_GSPO), dict(GSPO, **TOKEN_MEAN)),
    "gspo, dr_grpo": (
        dict(loss_type="dr_grpo", **TRL_GSPO),
        dict(GSPO, aggregation=Aggregation.seq_mean_token_sum_norm),
    ),
    "luspo": (dict(loss_type="luspo", **TRL_GSPO), dict(GSPO, aggregation=Aggregation.seq_mean_token_sum)),
    "cispo": (dict(loss_type="cispo", epsilon_high=5.0), dict(CISPO, **TOKEN_MEAN)),
    "sapo": (dict(loss_type="sapo"), SAPO),
    "sapo over sequences": (
        dict(loss_type="sapo", importance_sampling_level="sequence"),
        dict(SAPO, ratio=Ratio.sequence_mean),
    ),
    "delta": (dict(loss_type="grpo", delta=1.5), dict(dual_clip=1.5)),
    "kl": (dict(loss_type="grpo", beta=0.04, use_bias_correction_kl=False), dict(kl=KLConf(coefficient=0.04))),
    "kl, unbiased": (dict(loss_type="grpo", beta=0.04), dict(kl=KLConf(coefficient=0.04, unbiased=True))),
    "kl, gspo": (
        dict(loss_type="grpo", beta=0.04, use_bias_correction_kl=False, **TRL_GSPO),
        dict(GSPO, kl=KLConf(coefficient=0.04)),
    ),
    "kl, cispo": (
        dict(loss_type="cispo", epsilon_high=5.0, beta=0.04),
        dict(CISPO, **TOKEN_MEAN, kl=KLConf(coefficient=0.04, unbiased=True)),
    ),
    "entropy": (dict(loss_type="dapo", entropy_coef=0.1), dict(entropy_coefficient=0.1, **TOKEN_MEAN)),
    "off-policy mask": (
        dict(loss_type="grpo", off_policy_mask_threshold=0.05, beta=0.04),
        dict(off_policy_threshold=0.05, kl=KLConf(coefficient=0.04, unbiased=True)),
    ),
    "off-policy mask by the sampler": (
        dict(sampler("token_truncate", max=1e9), off_policy_mask_threshold=0.05),
        dict(off_policy_threshold=0.05, **corrected("token", "truncate", 1e9)),
    ),
    "truncate tokens": (sampler("token_truncate", max=1.2, min=0.9), corrected("token", "truncate", 1.2, 0.9)),
    "mask tokens": (sampler("token_mask", max=1.2, min=0.9), corrected("token", "mask", 1.2, 0.9)),
    "truncate products": (sampler("sequence_truncate", max=1.2), corrected("sequence_sum", "truncate", 1.2)),
    "mask products": (sampler("sequence_mask", max=1.2, min=0.5), corrected("sequence_sum", "mask", 1.2, 0.5)),
    "mask products, gspo, kl": (
        dict(sampler("sequence_mask", max=1.2), **TRL_GSPO, beta=0.04, use_bias_correction_kl=False),
        dict(GSPO, kl=KLConf(coefficient=0.04), **corrected("sequence_sum", "mask", 1.2)),
    ),
    "rloo": (
        dict(trainer="rloo", beta=0.0),
        dict(
            advantage_baseline=Baseline.leave_one_out,
            advantage_scale=AdvantageScale.none,
            ratio=Ratio.sequence_sum,
        ),
    ),
}
# name: TRL's advantage arguments, ours; with a reward that is missing, and one group of equal rewards
SCALES = {
    "group": (dict(scale_rewards="group"), {}),
    "batch": (dict(scale_rewards="batch"), dict(advantage_scale=AdvantageScale.batch)),
    "none": (dict(scale_rewards="none"), dict(advantage_scale=AdvantageScale.none)),
    "leave_one_out": (
        dict(trainer="rloo", beta=0.0),
        dict(advantage_baseline=Baseline.leave_one_out, advantage_scale=AdvantageScale.none),
    ),
}


@pytest.fixture(scope="module")
def differences(tmp_path_factory):
    """By case, the largest differences to TRL."""
    from environment import environment

    folder = tmp_path_factory.mktemp("trl")
    python = environment(folder / "environment", f"trl=={VERSION}")
    subprocess.run([python, __file__, folder], check=True, timeout=1500)
    return json.loads((folder / "differences.json").read_text())


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_trls(differences, name):
    found = differences[name]
    # TRL computes logprobs in fp32, and exponentiates their sum over a completion.
    tolerance = 1e-5 if name in ("rloo", "truncate products", "mask products", "mask products, gspo, kl") else 1e-6
    assert found["loss"] < tolerance and found["gradient"] < tolerance
    assert found["gradient of TRL"] > 1e-4  # relative to which the difference is small
    for metric in ("clip_ratio/low_mean", "clip_ratio/high_mean", "kl", "entropy"):
        assert found.get(metric, 0) < 1e-6, metric


@pytest.mark.parametrize("name", SCALES)
def test_advantages_are_trls(differences, name):
    assert differences[f"advantages, {name}"] < 1e-6


def test_the_overlong_penalty_is_trls(differences):
    assert differences["overlong"] < 1e-6


def compare(folder: Path) -> None:
    """Runs where TRL is installed. Writes `folder`/differences.json."""
    import torch
    from trl.rewards import get_soft_overlong_punishment

    from posttrain.advantages import advantages, overlong_penalty

    found = {name: loss_and_gradient(folder, trl, ours) for name, (trl, ours) in CASES.items()}
    rewards = [1.0, None, 0.5, 0.25, 2.0, 2.0, 2.0, 2.0]
    for name, (trl, ours) in SCALES.items():
        trainer = make_trainer(folder, dict(trl), rewards)
        scored = score(trainer, frozen(given_logits()))["advantages"].double()
        values = torch.tensor([float("nan") if r is None else r for r in rewards], dtype=torch.float64).view(2, 4)
        mine = advantages(values, torch.tensor(LENGTHS).view(2, 4), AlgorithmConf(**ours)).flatten()
        assert mine.isnan().tolist() == [r is None for r in rewards]
        found[f"advantages, {name}"] = (mine.nan_to_num(0.0) - scored).abs().max().item()
    lengths = torch.arange(40)
    penalty = get_soft_overlong_punishment(max_completion_len=30, soft_punish_cache=6)([[0] * n for n in lengths])
    cfg = OverlongConf(buffer=0.2)
    found["overlong"] = (overlong_penalty(lengths, 30, cfg) - torch.tensor(penalty)).abs().max().item()
    (folder / "differences.json").write_text(json.dumps(found))


def loss_and_gradient(folder: Path, arguments: dict, overrides: dict) -> dict[str, float]:
    import torch

    from posttrain.advantages import advantages, token_weights
    from posttrain.losses import policy_terms

    old, change = given_logits(0), 0.4 * given_logits(1)
    reference, new = old + 0.5 * given_logits(2), old + change
    new[::2] = old[::2] + change[::2] / 400  # little enough for GSPO's clip
    cfg = AlgorithmConf(**overrides)
    sampled = (token_logprobs(old)[0] + 0.1 * given_logits(3)[:, PROMPT:, 0]).float().double()  # TRL keeps them in fp32

    # TRL
    trainer = make_trainer(folder, dict(arguments), REWARDS)
    vllm = "vllm_importance_sampling_mode" in arguments
    if cfg.kl.coefficient:
        trainer.ref_model = frozen(reference)
    inputs = score(trainer, frozen(old), sampled if vllm else None)
    model = frozen(new).requires_grad_()
    loss = trainer._compute_loss(model, inputs)
    loss.backward()

    # Ours, all completions in one row
    leaf = new.clone().requires_grad_()
    mask = torch.arange(LONGEST)[None] < torch.tensor(LENGTHS)[:, None]

    def row_of(values):
        return values[mask][None]

    lengths = torch.tensor(LENGTHS)
    scored = advantages(torch.tensor(REWARDS, dtype=torch.float64).view(2, 4), lengths.view(2, 4), cfg).flatten()
    weights = token_weights(LENGTHS, cfg.aggregation, LONGEST)
    logprobs, entropy = token_logprobs(leaf)
    row = SimpleNamespace(
        weights_BK=torch.tensor(weights, dtype=torch.float64).repeat_interleave(lengths)[None],
        advantages_BK=scored.repeat_interleave(lengths)[None],
        sampled_logprobs_BK=row_of(sampled if vllm else token_logprobs(old)[0]),
        document_BK=torch.arange(len(LENGTHS)).repeat_interleave(lengths)[None],
        documents=len(LENGTHS),
        old_logprobs_BK=row_of(token_logprobs(old)[0]),
        reference_logprobs_BK=row_of(token_logprobs(reference)[0]) if cfg.kl.coefficient else None,
    )
    terms = policy_terms(row_of(logprobs), row_of(entropy), row, cfg)
    mine = (row.weights_BK * terms.loss_BK).sum()
    mine.backward()

    found = {
        "loss": abs(mine.item() - loss.item()) / max(1.0, abs(loss.item())),
        "loss of TRL": loss.item(),
        "gradient": (leaf.grad - model.logits.grad).abs().max().item(),
        "gradient of TRL": model.logits.grad.abs().max().item(),
    }
    metrics = trainer._metrics["train"]
    for name, values_BK in terms.means.items():
        # TRL averages what stands once on a completion over completions, we over tokens.
        if name in metrics and (name in ("kl", "entropy") or cfg.ratio is Ratio.token):
            found[name] = abs(values_BK.double().mean().item() - metrics[name][0])
    return found


def make_trainer(folder: Path, arguments: dict, rewards: list):
    """TRL's trainer on the embedded tiny model, which stands in until the one of given logits comes."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

    import posttrain

    rloo = arguments.pop("trainer", None) == "rloo"
    path = Path(posttrain.__file__).parent / "models" / "embedded" / "qwen3_dense"
    cfg = (RLOOConfig if rloo else GRPOConfig)(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        report_to="none",
        per_device_train_batch_size=len(LENGTHS),
        num_generations=4,
        num_iterations=2,  # so that it compares with the logprobs of another policy
        max_completion_length=LONGEST,
        temperature=TEMPERATURE,
        **arguments,
    )
    trainer = (RLOOTrainer if rloo else GRPOTrainer)(
        model=AutoModelForCausalLM.from_pretrained(path),
        reward_funcs=lambda completions, **_: rewards,
        args=cfg,
        train_dataset=Dataset.from_dict({"prompt": ["1+1="] * len(LENGTHS)}),
        processing_class=AutoTokenizer.from_pretrained(path),
    )
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def score(trainer, model, sampled=None) -> dict:
    """The inputs of its loss, of given completions."""
    ids = completions()
    prompts, texts = [[0] * PROMPT] * len(ids), ["?"] * len(ids)
    trainer.model = model
    if type(trainer).__name__ == "RLOOTrainer":
        trainer._generate = lambda _: (prompts, ids, texts)
    else:
        trainer.use_vllm = sampled is not None
        logprobs = None
        if sampled is not None:
            logprobs = [row[: len(c)].tolist() for row, c in zip(sampled, ids, strict=True)]
        trainer._generate = lambda _: (prompts, ids, None, texts, logprobs, {}, None, None)
    return trainer._generate_and_score_completions([{"prompt": "?"}] * len(ids))


def completions() -> list[list[int]]:
    import torch

    generator = torch.Generator().manual_seed(9)
    return [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in LENGTHS]


def given_logits(seed: int = 0):
    """[completions, positions, vocabulary]"""
    import torch

    shape = len(LENGTHS), PROMPT + LONGEST, VOCABULARY
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def token_logprobs(logits):
    """Logprobs and entropies [completions, LONGEST]; beyond a completion's end of token 0."""
    import torch

    ids = torch.tensor([row + [0] * (LONGEST - len(row)) for row in completions()])
    logprobs = (logits[:, PROMPT - 1 : -1] / TEMPERATURE).log_softmax(-1)
    return logprobs.gather(-1, ids[..., None]).squeeze(-1), -(logprobs.exp() * logprobs).sum(-1)


def frozen(logits):
    """A model that has these logits whatever it reads: its hidden states, through a head that is the identity."""
    import torch
    from transformers import Qwen3Config
    from trl.trainer.utils import add_fused_lm_head

    class Given(torch.nn.Module):
        is_gradient_checkpointing = False

        def __init__(self):
            super().__init__()
            self.logits = torch.nn.Parameter(logits.clone())
            self.config = Qwen3Config()
            self.head = torch.nn.Linear(VOCABULARY, VOCABULARY, bias=False, dtype=logits.dtype)
            self.head.weight.data = torch.eye(VOCABULARY, dtype=logits.dtype)

        def forward(self, *args, **kwargs):
            raise AssertionError("TRL asks for the fused head")

        def base_model(self, *args, **kwargs):
            return SimpleNamespace(last_hidden_state=self.logits)

        def get_output_embeddings(self):
            return self.head

    model = Given().requires_grad_(False).train()
    add_fused_lm_head(model, temperature=TEMPERATURE, outputs=("log_probs", "entropy"))
    return model


if __name__ == "__main__":
    compare(Path(sys.argv[1]))
