"""What `--help` says of each key: its default and its meaning, read from the dataclasses' own lines."""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import re
import sys
from typing import Any, get_type_hints

from posttrain.config.task import MISSING


def rows(schema: type, prefix: str = "") -> list[tuple[str, str, str]]:
    """(key, default, meaning) of each value of a dataclass; nested ones follow in place, with dotted keys."""
    found = []
    types = get_type_hints(schema)
    for each in dataclasses.fields(schema):
        key, kind = f"{prefix}{each.name}", types[each.name]
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            found += rows(kind, f"{key}.")
        else:
            meaning = meaning_of(schema, each.name)
            if isinstance(kind, type) and issubclass(kind, enum.Enum):
                meaning = f"{meaning} ({', '.join(kind)})"
            found.append((key, _default(each), meaning))
    return found


def meaning_of(schema: type, name: str) -> str:
    """The comment at the end of the field's line, in the class that defines it last. "" without one."""
    home = next(parent for parent in schema.__mro__ if name in parent.__dict__.get("__annotations__", {}))
    return _comments(home).get(name, "")


@functools.cache
def _comments(schema: type) -> dict[str, str]:
    source = inspect.getsource(sys.modules[schema.__module__])
    body = re.search(rf"^class {schema.__name__}\b.*?(?=^\S|\Z)", source, re.MULTILINE | re.DOTALL)
    return dict(re.findall(r"^    (\w+): .*?  # (.+)$", body[0], re.MULTILINE)) if body else {}


def _default(field: dataclasses.Field[Any]) -> str:
    """As it is typed."""
    value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return f"{value:g}"
    return "" if value == MISSING else str(value).replace(" ", "")
