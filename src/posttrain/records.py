"""What flows: problems in, rollouts out. Frozen records that every part agrees on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """One prompt, tokenized with its generation header, and its answer."""

    index: int  # position in its split, so that a log can name it
    prompt_ids: tuple[int, ...]
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One completion as it was sampled. The ids are what is trained on; text is never tokenized again.

    Example: prompt 3's second sample, "42<end>":
        Rollout(prompt_ids=(259, 16, 22), completion_ids=(19, 17, 256), logprobs=(-0.2, -0.1, -0.01),
                finish_reason="stop", group=3, answer="42")
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]  # with the end token where the model ended its turn; an empty one does not count
    logprobs: tuple[float, ...]  # of completion_ids, under the distribution that was sampled from
    finish_reason: str  # "stop": an end token was sampled; "length": max_new_tokens was reached
    group: int  # the prompt's place in the step's global batch; its samples share it
    answer: str

    def __len__(self) -> int:
        """Tokens of prompt and completion."""
        return len(self.prompt_ids) + len(self.completion_ids)

    @property
    def finished(self) -> bool:
        return self.finish_reason == "stop"
