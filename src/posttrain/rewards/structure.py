"""Rewards for the form of a completion that a user states: a regular expression, a JSON schema."""

from __future__ import annotations

import json
import re
from pathlib import Path

from posttrain.config.reward import RewardConf
from posttrain.errors import UserError
from posttrain.rewards.calling import Function


def regex(cfg: RewardConf) -> Function:
    """1 where `reward.pattern` is found in the completion; ^ and $ stand at lines, and . takes line breaks too."""
    if cfg.pattern is None:
        raise UserError("the reward regex needs a pattern: type reward.pattern=...")
    try:
        pattern = re.compile(cfg.pattern, re.MULTILINE | re.DOTALL)
    except re.error as error:
        raise UserError(f"reward.pattern={cfg.pattern}: no regular expression, {error}") from error
    return lambda completion: float(pattern.search(completion) is not None)


def json_schema(cfg: RewardConf) -> Function:
    """1 where the completion, or its last fenced block, is JSON that the schema in `reward.schema` allows."""
    if cfg.schema is None:
        raise UserError("the reward json_schema needs a schema: type reward.schema=<file.json>")
    try:
        import jsonschema
    except ImportError as error:
        raise UserError("the reward json_schema needs jsonschema: pip install jsonschema") from error
    try:
        schema = json.loads(Path(cfg.schema).read_text(encoding="utf-8"))
        kind = jsonschema.validators.validator_for(schema)
        kind.check_schema(schema)
    except (OSError, ValueError, jsonschema.SchemaError) as error:
        said = str(error).splitlines()[0]
        raise UserError(f"reward.schema={cfg.schema} holds no JSON schema: {said}") from error
    validator = kind(schema)

    def fits(completion: str) -> float:
        blocks = re.findall(r"```(?:json)?\s*\n(.*?)```", completion, re.DOTALL)
        try:
            return float(validator.is_valid(json.loads(blocks[-1] if blocks else completion)))
        # RecursionError: brackets a thousand deep.
        except (ValueError, RecursionError):
            return 0.0

    return fits
