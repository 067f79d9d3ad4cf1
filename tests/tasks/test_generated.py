"""Generated data and chat templates: read right, or refused in one line that says where. Nothing else is raised."""

import csv
import io
import json
import math
import tempfile
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from posttrain.config.task import FileConf, SystemRole, TaskName
from posttrain.errors import UserError
from posttrain.models.tiny import tiny_tokenizer
from posttrain.tasks import make_task

TOKENIZER = tiny_tokenizer()
COLUMNS = ("prompt", "answer")
MANY = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])

TEXT = st.text(st.characters(codec="utf-8"), max_size=12) | st.sampled_from(["\u2028", "a\x85b", "\x00", "007", "#"])
ANY_TEXT = TEXT | st.text(max_size=6)  # with halves of surrogate pairs
NUMBER = st.integers() | st.floats(allow_infinity=False, width=64) | st.sampled_from([0, 72.0, -0.0, 1e300])
PART = st.fixed_dictionaries({"type": st.just("text"), "text": TEXT})
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "tool", "assistant"]), "content": TEXT | st.lists(PART, max_size=2)},
    optional={"name": st.none()},
)
OTHER = st.booleans() | st.sampled_from([math.inf, {"a": 1}, {}, [1, "2"], [["3"]], [{"role": "user"}], [None]])
VALUE = st.none() | ANY_TEXT | NUMBER | st.lists(MESSAGE, max_size=3) | st.lists(TEXT, max_size=2) | OTHER
PLACES = {".jsonl": "line", ".json": "row", ".csv": "row", ".parquet": "row"}


def encodable(value):
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def null(value):
    return value is None or (isinstance(value, float) and math.isnan(value))


def is_number(value):
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def kind_of_prompt(value):
    """What must become of it: "null", "text", "messages" or "refused"."""
    if null(value):
        return "null"
    if is_number(value):
        return "text"
    if isinstance(value, str):
        return "text" if encodable(value) else "refused"
    if not isinstance(value, list) or not all(isinstance(each, dict) and "content" in each for each in value):
        return "refused"
    return "refused" if value and value[-1]["role"] == "assistant" else "messages"


def kind_of_answer(value):
    """What must become of it: "null", "text", "any" or "refused"."""
    if null(value):
        return "null"
    if is_number(value):
        return "text"
    if isinstance(value, bool):
        return "any"
    if isinstance(value, str):
        return "text" if encodable(value) else "refused"
    if not isinstance(value, list):
        return "refused"
    if any(kind_of_answer(each) not in ("null", "text", "any") or isinstance(each, list) for each in value):
        return "refused"
    return "any" if any(not null(each) for each in value) else "null"


def same_text(found, given):
    return Decimal(found) == Decimal(repr(given)) if is_number(given) else found == given


def content(message):
    given = message["content"]
    return given if isinstance(given, str) else "".join(part["text"] for part in given)


def write(path, rows, mark=""):
    if path.suffix == ".jsonl":
        text = "\n".join(json.dumps(row) for row in rows)
    elif path.suffix == ".json":
        text = json.dumps(rows, indent=1)
    else:
        stream = io.StringIO(newline="")
        writer = csv.writer(stream)
        writer.writerow(COLUMNS)
        writer.writerows([row[name] for name in COLUMNS] for row in rows)
        text = stream.getvalue()
    path.write_bytes((mark + text).encode())


def outcome(path, **options):
    """The task, or the one line that refuses it."""
    try:
        return make_task(FileConf(name=TaskName.jsonl, path=str(path), heldout=0, **options), TOKENIZER), ""
    except UserError as error:
        assert "\n" not in str(error)
        return None, str(error)


def check(path, rows):
    """Each row that has prompt and answer is a problem; the first value that is neither is named with its place."""
    task, said = outcome(path)
    kinds = [(kind_of_prompt(row["prompt"]), kind_of_answer(row["answer"])) for row in rows]
    bad = [
        (n, name)
        for n, each in enumerate(kinds, 1)
        for name, kind in zip(COLUMNS, each, strict=True)
        if kind == "refused"
    ]
    if bad:
        number, column = bad[0]
        assert f"task.path={path} {PLACES[path.suffix]} {number}, column {column}: " in said
        return
    asked = [n for n, (first, second) in enumerate(kinds) if "null" not in (first, second)]
    kept = [n for n in asked if not blank(rows[n])]
    if not kept:
        assert "has no prompt left of" in said and f" {len(rows)} rows: " in said
        return
    assert task is not None, said
    assert [problem.index for problem in task.train] == kept
    assert sum(task.dropped.values()) == len(rows) - len(kept)
    for problem in task.train:
        given = rows[problem.index]
        if isinstance(given["prompt"], list):
            assert [(m["role"], m["content"]) for m in problem.prompt] == [
                (m["role"], content(m)) for m in given["prompt"]
            ]
        else:
            assert same_text(problem.prompt, given["prompt"])
            assert TOKENIZER.decode(list(problem.prompt_ids)) == f"<|user|>{problem.prompt}<|end|><|assistant|>"
        answers = (problem.answer,) if isinstance(problem.answer, str) else problem.answer
        wanted = given["answer"] if isinstance(given["answer"], list) else [given["answer"]]
        wanted = [each for each in wanted if not null(each)]
        for each in wanted:
            assert any(a == str(each) if isinstance(each, bool) else same_as(a, each) for a in answers)


def same_as(found, given):
    try:
        return same_text(found, given)
    except ArithmeticError:  # text beside numbers
        return False


def blank(row):
    last = row["prompt"]
    if isinstance(last, list):
        last = content(last[-1]) if last else ""
    return not str(last).strip() or (isinstance(row["answer"], str) and not row["answer"].strip()) or only_blank(row)


def only_blank(row):
    """A list of one answer is that answer."""
    different = {str(each) for each in row["answer"]} if isinstance(row["answer"], list) else {"x"}
    return len({each for each in different if each != "None"}) == 1 and all(not each.strip() for each in different)


@MANY
@given(
    rows=st.lists(st.fixed_dictionaries({"prompt": VALUE, "answer": VALUE}), min_size=1, max_size=4),
    suffix=st.sampled_from([".jsonl", ".json"]),
    mark=st.sampled_from(["", "\ufeff"]),
)
def test_json_of_any_types(rows, suffix, mark):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"a{suffix}")
        write(path, rows, mark)
        check(path, rows)


@MANY
@given(
    rows=st.lists(st.fixed_dictionaries({"prompt": TEXT, "answer": TEXT}), min_size=1, max_size=4),
    mark=st.sampled_from(["", "\ufeff"]),
)
def test_csv_of_any_text(rows, mark):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.csv")
        write(path, rows, mark)
        check(path, rows)


@MANY
@given(data=st.data())
def test_parquet_of_any_types(data):
    """A column of parquet has one type, and nulls."""
    message = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": TEXT})
    small = st.integers(-(2**63), 2**63 - 1)
    kinds = [TEXT, small, st.floats(width=64), st.booleans(), st.binary(max_size=3), st.lists(TEXT, max_size=2)]
    kinds += [st.lists(small, max_size=2), st.lists(message, max_size=2), message]
    rows = data.draw(st.integers(1, 4))
    table = {}
    for name in COLUMNS:
        kind = data.draw(st.sampled_from(kinds))
        table[name] = data.draw(st.lists(st.none() | kind, min_size=rows, max_size=rows))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.parquet")
        pyarrow.parquet.write_table(pa.table(table), path)
        check(path, [{name: table[name][n] for name in COLUMNS} for n in range(rows)])


@MANY
@given(
    rows=st.lists(st.fixed_dictionaries({"prompt": TEXT, "answer": TEXT}), min_size=1, max_size=4),
    suffix=st.sampled_from([".jsonl", ".json", ".csv"]),
    codec=st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1", "cp037"]),
)
def test_encodings(rows, suffix, codec):
    """What is not UTF-8 is refused by its name; no bytes tell Latin-1 that is valid UTF-8 from UTF-8."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"a{suffix}")
        write(path, rows)
        text = path.read_bytes().decode()
        if suffix != ".csv":
            # Letters beyond ASCII stand in the file as themselves.
            lines = [json.dumps(row, ensure_ascii=False) for row in rows]
            text = "\n".join(lines) if suffix == ".jsonl" else f"[{', '.join(lines)}]"
        try:
            path.write_bytes(text.encode(codec))
        except UnicodeEncodeError:
            assume(False)
        if codec in ("utf-8", "utf-8-sig") or (codec == "latin-1" and text.isascii()):
            check(path, rows)
            return
        task, said = outcome(path)
        readable = codec == "latin-1" and task is not None
        assert readable or f"task.path={path}" in said or "has no prompt left of" in said


@MANY
@given(
    rows=st.lists(st.fixed_dictionaries({"prompt": TEXT, "answer": TEXT}), min_size=1, max_size=4),
    suffix=st.sampled_from([".jsonl", ".json", ".csv", ".parquet"]),
    end=st.floats(0, 1),
    broken=st.binary(max_size=3),
)
def test_torn_and_damaged_files(rows, suffix, end, broken):
    """Each whole row in front of the damage is as it was, or the file is refused by its name."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"a{suffix}")
        if suffix == ".parquet":
            pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
        else:
            write(path, rows)
        whole = path.read_bytes()
        path.write_bytes(whole[: int(end * len(whole))] + broken)
        task, said = outcome(path)
        if task is None:
            assert f"task.path={path}" in said or "has no prompt left of" in said
        elif suffix == ".json":
            # An array is whole or nothing.
            assert {(p.prompt, p.answer) for p in task.train} <= {(row["prompt"], row["answer"]) for row in rows}
        else:
            before = [(row["prompt"], row["answer"]) for row in rows]
            assert all((p.prompt, p.answer) == before[p.index] for p in task.train[:-1])


@MANY
@given(nesting=st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=4), answer=TEXT, lacks=st.booleans())
def test_nested_columns(nesting, answer, lacks):
    assume(answer.strip())
    value = answer
    for name in reversed(nesting):
        value = {name: value}
    asked = ".".join([*nesting[:-1], "z" if lacks else nesting[-1]])
    with tempfile.TemporaryDirectory() as folder:
        for suffix in (".jsonl", ".parquet"):
            path = Path(folder, f"a{suffix}")
            row = {"prompt": "?", "x": value}
            if suffix == ".jsonl":
                path.write_text(json.dumps(row))
            else:
                pyarrow.parquet.write_table(pa.Table.from_pylist([row]), path)
            task, said = outcome(path, answer_column=f"x.{asked}")
            if lacks:
                assert f"task.path={path} {PLACES[suffix]} 1 has no column 'x.{asked}'" in said
            else:
                assert task.train[0].answer == answer


@pytest.fixture(scope="module")
def one_row(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "a.jsonl"
    path.write_text(json.dumps({"prompt": "1+1=", "answer": "2"}))
    return path


@MANY
@given(
    system=st.sampled_from(["written", "dropped", "raising"]),
    user=st.sampled_from(["written", "trimmed", "dropped", "raising"]),
    header=st.sampled_from(["<|assistant|>", "", None]),
    bos=st.sampled_from(["", "<|pad|>", "<|pad|><|pad|>"]),
    ends=st.sampled_from(["<|end|>", "", "<|system|>"]),
    syntax=st.sampled_from(["", "", "", "{% if %}", "{{ messages[9].content | trim }}"]),
    prompt=st.sampled_from([None, "Think."]),
    role=st.sampled_from(SystemRole),
)
def test_chat_templates(one_row, system, user, header, bos, ends, syntax, prompt, role):
    """`header` None: the template has one for turns in the past alone."""
    turn = {
        "written": "{{ m.content }}",
        "trimmed": "{{ m.content | trim }}",
        "dropped": "",
        "raising": "{{ raise_exception('no') }}",
    }
    made = tiny_tokenizer()
    made.bos_token = "<|pad|>"
    made.chat_template = (
        f"{bos}{syntax}{{% for m in messages %}}{{% if m.role == 'system' %}}{turn[system]}"
        f"{{% elif m.role == 'user' %}}<|user|>{turn[user]}{{% else %}}"
        f"{'<|assistant|>' if header is None else header}{{{{ m.content }}}}{{% endif %}}{ends}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{header or ''}{{% endif %}}"
    )
    cfg = FileConf(name=TaskName.jsonl, path=str(one_row), heldout=0, system_prompt=prompt, system_role=role)
    moved = role is SystemRole.user
    faults = {
        "the chat template fails": bool(syntax)
        or user == "raising"
        or (bool(prompt) and not moved and system == "raising"),
        "drops the system turn": bool(prompt) and not moved and system == "dropped",
        "drops the user turn": user == "dropped",
        "no generation header": header is None,
        "twice": bos == "<|pad|><|pad|>",
        "end with the end token": header == "" and bool(ends),
    }
    expected = {words for words, holds in faults.items() if holds}
    try:
        task = make_task(cfg, made)
    except UserError as error:
        assert "\n" not in str(error) and any(words in str(error) for words in expected), (str(error), expected)
        return
    assert not expected
    asked = "1+1=" if not prompt else ("Think.\n\n1+1=" if moved else f"Think.{ends}<|user|>1+1=")
    asked = asked if asked.startswith("Think.") and prompt and not moved else f"<|user|>{asked}"
    assert made.decode(list(task.train[0].prompt_ids)) == f"{bos}{asked}{ends}{header}"
    assert task.template.turn_ends == ((ends,) if ends else ())
    assert task.template.header == header
