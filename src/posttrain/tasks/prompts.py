"""From the rows of a task to problems: through the chat template to token ids."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from posttrain.config.task import TaskConf
from posttrain.records import Problem
from posttrain.tasks.task import Row


def problems(rows: list[Row], cfg: TaskConf, tokenizer: PreTrainedTokenizerBase) -> list[Problem]:
    """Prompts through the chat template (which holds the only BOS), in one call; overlong ones are left out."""
    if not rows:
        return []
    texts = [_render(row.prompt, cfg.system_prompt, tokenizer) for row in rows]
    encoded = tokenizer(texts, add_special_tokens=tokenizer.chat_template is None)["input_ids"]
    return [
        Problem(task=cfg.name.value, index=index, prompt=row.prompt, prompt_ids=tuple(ids), answer=row.answer)
        for index, (row, ids) in enumerate(zip(rows, encoded, strict=True))
        if row.prompt.strip() and 0 < len(ids) <= cfg.max_prompt_tokens
    ]


def _render(prompt: str, system: str | None, tokenizer: PreTrainedTokenizerBase) -> str:
    if tokenizer.chat_template is None:
        return prompt if system is None else f"{system}\n\n{prompt}"
    turns = [{"role": "system", "content": system}] if system else []
    turns.append({"role": "user", "content": prompt})
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    # Ids come only with tokenize=True.
    assert isinstance(text, str)
    return text
