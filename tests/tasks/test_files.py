"""Files as people have them: each format's odd cases are read, or refused with the file and the place in it."""

import csv
import json
import math
import os
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet
import pytest

from posttrain.config.task import FileConf, TaskName
from posttrain.errors import UserError
from posttrain.models.tiny import tiny_tokenizer
from posttrain.tasks import files, make_task

TOKENIZER = tiny_tokenizer()
ROW = {"prompt": "1+1=", "answer": "2"}


def conf(path, **options):
    path = [str(each) for each in path] if isinstance(path, list) else str(path)
    return FileConf(name=TaskName.jsonl, path=path, **{"heldout": 0} | options)


def rows(path, **options):
    """(prompt, answer) of each row."""
    return [row[:2] for row in files.split(conf(path, **options))[0]]


def written(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def parquet(path, table):
    pyarrow.parquet.write_table(pa.table(table), path)
    return path


def refused(path, **options):
    with pytest.raises(UserError) as error:
        files.split(conf(path, **options))
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c"])
def test_only_a_line_feed_ends_a_line_of_json(tmp_path, separator):
    text = f"one{separator}two"
    line = f'{{"prompt": "{text}", "answer": "{text}"}}' if separator in "\u2028\u2029\x85" else ""
    content = f"{line or json.dumps({'prompt': text, 'answer': text})}\r\n\n{json.dumps(ROW)}"
    assert rows(written(tmp_path / "a.jsonl", content)) == [(text, text), ("1+1=", "2")]


def test_a_broken_line_is_named_by_its_number(tmp_path):
    lines = [json.dumps(ROW)] * 16 + ['{"prompt": "?", "answer": }'] + [json.dumps(ROW)]
    file = written(tmp_path / "a.jsonl", "\n".join(lines))
    assert f"task.path={file} cannot be read: line 17, character 27: Expecting value" in refused(file)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".JSON"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("indent", [None, 2])
def test_arrays_and_lines_are_read_under_both_endings(tmp_path, suffix, mark, indent):
    array = written(tmp_path / f"array{suffix}", mark + json.dumps([ROW, ROW], indent=indent))
    lines = written(tmp_path / f"lines{suffix}", mark + json.dumps(ROW) + "\n" + json.dumps(ROW))
    assert rows(array) == rows(lines) == [("1+1=", "2")] * 2


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("a.json", '[{"prompt": "?", "answer": 1},\n {"prompt"]', "line 2, character 11"),
        ("a.json", '{\n"data": [{"prompt": "?", "answer": 1}]\n}\n', "it is one JSON object over several lines"),
        ("a.json", '[{"prompt": "?", "answer": 1}, null]', "row 2 is null: it must be a JSON object"),
        ("a.jsonl", '{"prompt": "?", "answer": 1}\n{"prompt": "?", "answ', "line 2, character 17"),
        ("a.jsonl", b'{"prompt": "?", "answer": 1}\n{"prompt": "\xff"}', "line 2: byte 0xff is not UTF-8"),
        ("a.jsonl", '{"prompt": "\x00", "answer": 1}', "line 1, character 13: Invalid control character"),
        ("a.jsonl", '{"prompt": "?", "answer": ' + "9" * 5000 + "}", "line 1: Exceeds the limit"),
        ("a.jsonl", '{"prompt": "?", "answer": ' + "[" * 100_000, "line 1: maximum recursion depth"),
        ("a.jsonl", '{"prompt": "?", "answer": "\\ud800"}', "line 1, column answer: character 1 is \\ud800"),
        ("a.jsonl", '{"prompt": "a\\udc00", "answer": 1}', "line 1, column prompt: character 2 is \\udc00"),
        ("a.jsonl", json.dumps(ROW).encode("utf-16"), "it is UTF-16: save it as UTF-8"),
        ("a.jsonl", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
        ("a.parquet", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
        ("a.jsonl", "", "holds no row"),
        ("a.json", "[]", "holds no row"),
        ("a.csv", "prompt,answer\n", "holds no row"),
        ("a.csv", "prompt,answer\n?,1\n1, 2 and 3?,4\n", "row 2 has 3 fields, and the header has 2"),
        ("a.csv", "prompt,answer\n?,1\n?\n", "row 2 has 1 field, and the header has 2"),
        ("a.csv", 'prompt,answer\n?,1\n"torn,1\n?,2\n', "row 2: unexpected end of data"),
        ("a.csv", "prompt,prompt\n?,1\n", "its header names 'prompt' twice"),
        ("a.csv", b"prompt,answer\n?,1\n\xe9,1\n", "line 3: byte 0xe9 is not UTF-8"),
        ("a.csv", 'prompt,"the\nanswer"\n?,1\n', "has no column 'answer'; it has prompt, 'the\\nanswer'."),
        ("a.csv", "prompt;answer\n?;1\n", "row 1 has no column 'prompt'; it has prompt;answer. Set task.prompt_column"),
        ("a.parquet", b"PAR1 torn", "a.parquet cannot be read: "),
        ("a.parquet", b"", "a.parquet cannot be read: "),
        ("a.txt", "?", "the name must end in .jsonl, .json, .csv, .parquet"),
        ("a.jsonl.gz", b"\x1f\x8b", "the name must end in"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place(tmp_path, name, content, words):
    file = written(tmp_path / name, content)
    message = refused(file)
    assert message.startswith(f"task.path={file}") and words in message


def test_csv_fields_of_any_length_line_breaks_and_marks(tmp_path):
    long = "x" * 300_000
    file = tmp_path / "a.csv"
    csv.field_size_limit(131_072)
    with file.open("w", newline="", encoding="utf-8-sig") as stream:
        writer = csv.writer(stream)
        writer.writerows([["prompt", "answer"], [long, "a,b"], ["two\r\nlines\u2028", "007"], ["nul \x00", ""]])
    assert rows(file) == [(long, "a,b"), ("two\r\nlines\u2028", "007"), ("nul \x00", "")]
    assert csv.field_size_limit() == 131_072


def test_nested_columns_by_dotted_names(tmp_path):
    """As verl's files have them: messages, and the answer in a struct; null structs hold no answer."""
    question = [{"role": "user", "content": "1+1="}]
    table = {
        "prompt": [question, question],
        "reward_model": [{"style": "rule", "ground_truth": "2"}, None],
        "extra": [{"deep": {"answers": [2, 3]}}, {"deep": {"answers": None}}],
        "a.b": ["whole", "name"],
    }
    file = parquet(tmp_path / "a.parquet", table)
    asked = ({"role": "user", "content": "1+1="},)
    assert rows(file, answer_column="reward_model.ground_truth") == [(asked, "2"), (asked, None)]
    assert rows(file, answer_column="extra.deep.answers") == [(asked, ("2", "3")), (asked, None)]
    assert rows(file, answer_column="a.b") == [(asked, "whole"), (asked, "name")]
    message = refused(file, answer_column="reward_model.truth")
    assert "row 1 has no column 'reward_model.truth'" in message and "Set task.answer_column" in message
    assert "row 1 has no column 'a.b.c'" in refused(file, answer_column="a.b.c")


def test_numbers_of_parquet_are_the_ones_that_were_written(tmp_path):
    table = {
        "prompt": pa.array([0, 1, 2, 3]),
        "whole": pa.array([72.0, -0.0, 1e23, math.nan]),
        "single": pa.array([0.1, 72.0, None, -1.5], pa.float32()),
        "exact": pa.array([Decimal("1.50"), Decimal("1234567890123456789012345678.90"), Decimal("0.00"), None]),
    }
    file = parquet(tmp_path / "a.parquet", table)
    found = {name: [answer for _, answer in rows(file, answer_column=name)] for name in table}
    assert found == {
        "prompt": ["0", "1", "2", "3"],
        "whole": ["72", "0", "100000000000000000000000", None],
        "single": ["0.1", "72", None, "-1.5"],
        "exact": ["1.5", "1234567890123456789012345678.9", "0", None],
    }
    assert [prompt for prompt, _ in rows(file, answer_column="prompt")] == ["0", "1", "2", "3"]


def test_text_of_parquet_that_is_not_utf8_is_named_by_its_row(tmp_path):
    broken = pa.array([b"fine", b"\xff"]).view(pa.string())
    file = parquet(tmp_path / "a.parquet", {"prompt": broken, "answer": ["1", "2"]})
    assert f"task.path={file} cannot be read: row 2: 'utf-8' codec" in refused(file)


def test_bytes_and_dates_are_no_answers(tmp_path):
    table = {"prompt": ["?"], "raw": [b"4"], "day": pa.array([0], pa.date32())}
    file = parquet(tmp_path / "a.parquet", table)
    assert "row 1, column raw: an answer is text, a number or a list" in refused(file, answer_column="raw")
    assert "this is a value of type date" in refused(file, answer_column="day")
    assert "row 1, column raw: a prompt is text" in refused(file, prompt_column="raw", answer_column="prompt")


@pytest.fixture
def folder(tmp_path):
    """a.jsonl, b.csv and c.parquet of one row each, and files that are no rows."""
    written(tmp_path / "b.csv", "prompt,answer\nb,2\n")
    written(tmp_path / "a.jsonl", '{"prompt": "a", "answer": "1"}')
    parquet(tmp_path / "c.parquet", {"prompt": ["c"], "answer": ["3"]})
    written(tmp_path / "README.md", "# Rows")
    return tmp_path


def test_several_files_a_glob_and_a_directory(folder):
    a, b, c = ("a", "1"), ("b", "2"), ("c", "3")
    assert rows(folder) == rows(folder / "[abc].*") == [a, b, c]
    assert rows([folder / "c.parquet", folder / "a.jsonl"]) == [c, a]
    assert rows([folder / "*.parquet", folder / "*.csv"]) == [c, b]
    (folder / "more").mkdir()
    written(folder / "more" / "d.csv", "prompt,answer\nd,4\n")
    assert rows(folder / "**" / "*.csv") == [b, ("d", "4")]
    literal = written(folder / "d[1].jsonl", json.dumps(ROW))
    assert rows(literal) == [("1+1=", "2")]


@pytest.mark.parametrize(
    "path, words",
    [
        ("*.csvv", "no file matches"),
        ("*", "README.md: the name must end in"),
        ("empty", "the directory has no file that ends in .jsonl"),
        ("none.jsonl", "none.jsonl cannot be read: No such file or directory"),
    ],
)
def test_paths_that_mean_no_file(folder, path, words):
    (folder / "empty").mkdir()
    assert words in refused(folder / path)


@pytest.mark.parametrize("path", [3, [], [1], {"a": 1}, [["a.jsonl"]]])
def test_a_path_is_a_name_or_a_list_of_names(path):
    with pytest.raises(UserError, match="task.eval_path=.*must be a file, a glob, a directory, or a list"):
        files.files_of(path, "task.eval_path")


def test_errors_of_the_held_out_file_name_it(folder):
    other = written(folder / "other.jsonl", '{"prompt": "?", "result": 1}')
    message = refused(folder / "a.jsonl", eval_path=str(other))
    assert message == (
        f"task.eval_path={other} line 1 has no column 'answer'; it has prompt, result. Set task.answer_column."
    )
    torn = written(folder / "torn.jsonl", "{")
    assert refused(folder / "a.jsonl", eval_path=[str(torn)]).startswith(f"task.eval_path={torn} cannot be read")


def test_held_out_files_are_not_trained_on(folder):
    message = refused(folder, eval_path=str(folder / "b.csv"))
    assert message.startswith(f"task.eval_path names {folder / 'b.csv'}, which task.path names too")
    train, heldout = files.split(conf([folder / "a.jsonl", folder / "c.parquet"], eval_path=str(folder / "*.csv")))
    assert [row.prompt for row in train] == ["a", "c"] and [row.prompt for row in heldout] == ["b"]


def test_rows_know_their_place(folder):
    file = written(folder / "a.jsonl", "\n" + json.dumps(ROW))
    train, _ = files.split(conf(folder))
    assert [row.place for row in train] == [
        f"task.path={file} line 2",
        f"task.path={folder / 'b.csv'} row 1",
        f"task.path={folder / 'c.parquet'} row 1",
    ]


def test_what_is_dropped_is_counted_by_reason(tmp_path):
    given = [ROW, {"prompt": None, "answer": 1}, {"prompt": "?", "answer": None}, {"prompt": " ", "answer": 1}]
    given += [{"prompt": "?", "answer": []}, {"prompt": "?", "answer": "\n"}, {"prompt": math.nan, "answer": 1}]
    given += [{"prompt": 0, "answer": 0}, {"prompt": [], "answer": 1}, {"prompt": "x" * 99, "answer": 1}]
    file = written(tmp_path / "a.jsonl", "\n".join(map(json.dumps, given)))
    task = make_task(conf(file, max_prompt_tokens=50), TOKENIZER)
    assert [(p.index, p.prompt, p.answer) for p in task.train] == [(0, "1+1=", "2"), (7, "0", "0")]
    assert task.dropped == {
        "no prompt": 2,
        "no answer": 2,
        "empty prompt": 2,
        "empty answer": 1,
        "longer than task.max_prompt_tokens": 1,
    }


def test_a_file_whose_rows_are_all_dropped_says_why(tmp_path):
    file = written(tmp_path / "a.jsonl", '{"prompt": "?", "answer": null}\n' * 3 + '{"prompt": null, "answer": 1}')
    with pytest.raises(UserError, match="task=jsonl has no prompt left of 4 rows: 3 no answer, 1 no prompt$"):
        make_task(conf(file), TOKENIZER)


@pytest.mark.timeout(30)
def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.jsonl")
    assert "a.jsonl is a pipe or a device: write what comes out of it" in refused(str(tmp_path / "a.jsonl"))
