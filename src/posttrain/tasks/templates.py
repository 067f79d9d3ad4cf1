"""What the chat template and the tokenizer make of a conversation, looked at once, before the first step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from posttrain.errors import UserError
from posttrain.models.chat import ANSWER, TemplateError, Turns, render, turn_end
from posttrain.records import Problem

SYSTEM = ("system", "developer")  # roles of a system prompt
MOVE = "type task.system_role=user to put the system prompt at the head of the user's turn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """What was found, for the banner, the summary and the preflight."""

    rendered: str  # the first prompt, as the model sees it
    header: str  # what begins the model's turn; "": the prompt's end is where it begins
    turn_ends: tuple[str, ...]  # tokens that the template ends an assistant's turn with
    turn_end_ids: tuple[int, ...]
    system: str  # where the system prompt went; "": there is none
    appended: tuple[int, ...]  # tokens that the tokenizer puts after any text; they are stripped from prompts
    warnings: tuple[str, ...]

    def in_words(self) -> list[str]:
        """A line a fact; none without a chat template."""
        found = [f"the model's turn begins after {self.header!r}"] if self.header else []
        found += [f"a turn ends with {' '.join(self.turn_ends)}"] if self.turn_ends else []
        return found + ([f"the system prompt is {self.system}"] if self.system else [])

    def facts(self) -> dict[str, Any]:
        """For summary.json, without the prompt."""
        return {
            "header": self.header,
            "turn_ends": list(self.turn_ends),
            "system": self.system,
            "warnings": list(self.warnings),
        }


def inspect(turns: Turns, system: str, tokenizer: PreTrainedTokenizerBase, where: str = "") -> Template:
    """Of the first prompt, which stands at `where`; `system` says where its system prompt went.

    Raises UserError, in one line with what to type, for a template that raises, drops a part of the conversation,
    writes no generation header or two BOS; and for a tokenizer without an end token.
    """
    ends = tuple(sorted(turn_end(tokenizer)))
    names = tuple(map(str, tokenizer.convert_ids_to_tokens(list(ends))))
    if tokenizer.eos_token_id is None:
        advice = f" to {names[0]}, which ends a turn in the chat template" if names else ""
        raise UserError(
            f"the tokenizer has no end token: set eos_token in the model's tokenizer_config.json{advice}, or no "
            "completion can end"
        )
    appended = _appended(tokenizer)
    warnings = []
    if appended:
        names_appended = " ".join(map(str, tokenizer.convert_ids_to_tokens(list(appended))))
        warnings.append(f"the tokenizer ends each text with {names_appended}: it is stripped from the prompts")
    text = written(turns, tokenizer, where)
    header = "" if tokenizer.chat_template is None else _header(turns, text, tokenizer)
    if header is None:
        warnings.append(
            "the chat template takes no notice of add_generation_prompt, and whether it begins the model's turn cannot "
            f"be told: the first prompt ends with {text[-40:]!r}"
        )
    ids = encode([text], tokenizer, appended)[0]
    bos = tokenizer.bos_token_id
    if bos is not None and list(ids[:2]) == [bos, bos]:
        raise UserError(
            f"prompts begin with {tokenizer.bos_token} twice: take it out of the chat template, or out of the prompts"
        )
    begins = tokenizer("a")["input_ids"][:1] == [bos]
    if bos is not None and begins and list(ids[:1]) != [bos]:
        warnings.append(
            f"prompts begin without {tokenizer.bos_token}, which the tokenizer puts before other text: the chat "
            "template leaves it out"
        )
    if ids and ids[-1] in {tokenizer.eos_token_id, *ends}:
        end = tokenizer.convert_ids_to_tokens(ids[-1])
        raise UserError(
            f"prompts end with the end token {end}, which only completions may: take it out of the chat template, or "
            "out of the prompts"
        )
    if tokenizer.chat_template is not None and not ends:
        warnings.append(
            f"the chat template ends a turn with no token of its own: completions end with {tokenizer.eos_token} alone"
        )
    return Template(
        rendered=text,
        header=header or "",
        turn_ends=names,
        turn_end_ids=ends,
        system=system,
        appended=appended,
        warnings=tuple(warnings),
    )


def written(turns: Turns, tokenizer: PreTrainedTokenizerBase, where: str = "") -> str:
    """The conversation as the model sees it, with what begins its turn; without a template a blank line between turns.

    Raises UserError, with `where` the conversation stands, for a template that raises or drops a part of it.
    """
    at = f"{where}: " if where else ""
    if tokenizer.chat_template is None:
        return "\n\n".join(turn["content"] for turn in turns)
    try:
        text = render(tokenizer, turns)
    except TemplateError as error:
        others = [turn for turn in turns if turn["role"] not in SYSTEM]
        helps = len(others) < len(turns) and _renders(others, tokenizer)
        advice = f". Without the system prompt it does not: {MOVE}" if helps else ""
        raise UserError(f"{at}the chat template fails: {str(error).rstrip('.')}{advice}") from error
    # Templates trim, and some fold white space.
    squeezed = None
    for turn in turns:
        if turn["role"] not in ("user", *SYSTEM) or turn["content"].strip() in text:
            # Many templates leave out what a model thought in earlier turns, and write results of tools as JSON.
            continue
        squeezed = "".join(text.split()) if squeezed is None else squeezed
        if "".join(turn["content"].split()) not in squeezed:
            role = turn["role"]
            advice = MOVE if role in SYSTEM else "mend chat_template of the model's tokenizer"
            raise UserError(f"{at}the chat template drops the {role} turn {turn['content'][:40]!r}: {advice}")
    return text


def _renders(turns: Turns, tokenizer: PreTrainedTokenizerBase) -> bool:
    try:
        render(tokenizer, turns)
    except TemplateError:
        return False
    return True


def encode(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, appended: tuple[int, ...]
) -> list[tuple[int, ...]]:
    """Ids of each text. The template holds the only BOS. Without one the tokenizer adds it; `appended` is cut off."""
    ids = tokenizer(list(texts), add_special_tokens=tokenizer.chat_template is None)["input_ids"]
    cut = len(appended) if tokenizer.chat_template is None else 0
    return [tuple(each[: len(each) - cut]) for each in ids]


def check_vocabulary(problems: Iterable[Problem], tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> None:
    """Raises UserError for a token that the model has no embedding of, with its place."""
    for option, token, number in (
        ("pad_token", tokenizer.pad_token, tokenizer.pad_token_id),
        ("eos_token", tokenizer.eos_token, tokenizer.eos_token_id),
    ):
        if number is not None and number >= vocabulary:
            raise UserError(
                f"{option} of the tokenizer, {token}, has the id {number}, and the model has embeddings of "
                f"{vocabulary} tokens: set it to a token of the model in tokenizer_config.json"
            )
    for problem in problems:
        largest = max(problem.prompt_ids)
        if largest >= vocabulary:
            token = tokenizer.convert_ids_to_tokens(largest)
            raise UserError(
                f"problem {problem.index} of task={problem.task} holds the token {token!r} of id {largest}, and the "
                f"model has embeddings of {vocabulary} tokens: model.path needs the tokenizer that it was trained with"
            )


def _header(turns: Turns, text: str, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """What the template adds for the model's turn; None where that cannot be told.

    Raises UserError where it leaves a header to the model.
    """
    try:
        bare = render(tokenizer, turns, generation=False)
        full = render(tokenizer, [*turns, {"role": "assistant", "content": ANSWER}], generation=False)
    except TemplateError:
        # Templates for single questions may refuse an assistant's turn.
        return None
    if text != bare:
        # Some templates close a conversation that is not to go on.
        return text.removeprefix(bare) if text.startswith(bare) else text.rpartition(turns[-1]["content"].strip())[2]
    if not full.startswith(text):
        return None
    between = full.removeprefix(text).rpartition(ANSWER)[0]
    if between.strip():
        raise UserError(
            f"the chat template writes no generation header: before the model's turn belongs {between!r}, which "
            "add_generation_prompt must add. Mend chat_template of the model's tokenizer"
        )
    return ""


def _appended(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """What the tokenizer puts after any text. Only prompts without a template go through it."""
    if tokenizer.chat_template is not None:
        return ()
    whole = tokenizer("a")["input_ids"]
    alone = tokenizer("a", add_special_tokens=False)["input_ids"]
    starts = [first for first in range(len(whole)) if whole[first : first + len(alone)] == alone]
    return tuple(whole[starts[-1] + len(alone) :]) if alone and starts else ()
