"""Values as people have them: text, messages, numbers, lists and nulls; anything else is refused in words."""

import json
import math

import pytest

from posttrain.tasks.columns import Unusable, answer, prompt

USER = {"role": "user", "content": "1+1="}


@pytest.mark.parametrize(
    "value, expected",
    [
        ("4", "4"),
        ("007", "007"),
        (" 4\n", " 4\n"),
        ("", ""),
        (None, None),
        (math.nan, None),
        (4, "4"),
        (0, "0"),
        (-3, "-3"),
        (72.0, "72"),
        (-0.0, "0"),
        (0.1, "0.1"),
        (1e-7, "0.0000001"),
        (1e23, "100000000000000000000000"),
        (2**70, "1180591620717411303424"),
        (True, ("true", "True")),
        (False, ("false", "False")),
        (["4", "four"], ("4", "four")),
        ([4, "4", 4.0], "4"),
        ([None, "4"], "4"),
        ([True, "yes"], ("true", "True", "yes")),
        ([], None),
        ([None, math.nan], None),
    ],
)
def test_answers(value, expected):
    assert answer(value) == expected


@pytest.mark.parametrize(
    "value, words",
    [
        (b"4", "this is bytes"),
        ({"value": 4}, "this is an object with fields"),
        ([["4"]], "this one holds a list"),
        ([{"text": "4"}], "this is an object with fields"),
        (math.inf, "infinite"),
        ([-math.inf], "infinite"),
        ("\ud83d", "character 1 is \\ud83d, half a character"),
        (object(), "a value of type object"),
    ],
)
def test_what_is_no_answer(value, words):
    with pytest.raises(Unusable) as error:
        answer(value)
    assert words in str(error.value)


@pytest.mark.parametrize(
    "value, expected",
    [
        ("1+1=", "1+1="),
        (0, "0"),
        (1.5, "1.5"),
        (None, None),
        (math.nan, None),
        ([], ()),
        ([USER], (USER,)),
        ([USER | {"name": None}], (USER,)),
        ([{"role": "user", "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "1="}]}], (USER,)),
        ([{"role": "user", "content": [{"type": "text", "text": "1+1=", "image": None}]}], (USER,)),
        (json.dumps([USER]), (USER,)),
        (json.dumps([USER], indent=1), (USER,)),
        ('[{"role": of the', '[{"role": of the'),
        ("[{'a': 1}]", "[{'a': 1}]"),
    ],
)
def test_prompts(value, expected):
    assert prompt(value) == expected


@pytest.mark.parametrize(
    "value, words",
    [
        ({"text": "?"}, "this is an object with fields"),
        (b"?", "this is bytes"),
        (True, "this is a truth value"),
        (["?", "!"], "and this one holds others"),
        ([USER, "?"], "and this one holds others"),
        ([{"content": "?"}], "message 1 has no role"),
        ([{"from": "human", "value": "?"}], "message 1 has no role"),
        ([USER | {"role": 1}], "message 1 has no role"),
        ([USER, {"role": "user"}], "message 2 has null as its content"),
        ([USER | {"content": 4}], "message 1 has a value of type int as its content"),
        ([USER | {"content": [{"type": "image"}]}], "message 1 has a part of type 'image'"),
        ([USER | {"content": ["?"]}], "message 1 has a value of type str as a part"),
        ([USER | {"content": "\udfff"}], "half a character"),
        ([USER, {"role": "assistant", "content": "2"}], "ends with an assistant's turn"),
        (str([USER]), "messages as Python prints them: write them as JSON"),
    ],
)
def test_what_is_no_prompt(value, words):
    with pytest.raises(Unusable) as error:
        prompt(value)
    assert words in str(error.value) and "\n" not in str(error.value)
