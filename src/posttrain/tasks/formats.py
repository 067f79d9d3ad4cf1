"""One file of rows: JSON lines, a JSON array, CSV or parquet. What cannot be read is refused with its line or row."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

LFS = b"version https://git-lfs.github.com/spec/"
UTF16 = (b"\xff\xfe", b"\xfe\xff")
FIELD = 2**31 - 1  # the longest field of a CSV file, in characters: the most that a C long of 32 bits holds


class Unreadable(ValueError):
    """Why a file, or one place in it, cannot be read; begins with the place where there is one."""


class Record(NamedTuple):
    """The columns of one row, and where they stand in their file."""

    place: str  # "line 17" or "row 17", from 1
    columns: dict[str, Any]


def read(file: Path) -> list[Record]:
    """All rows of a file, by the ending of its name. Raises Unreadable, or OSError for a file that does not open."""
    with file.open("rb") as stream:
        head = stream.read(len(LFS))
    if head == LFS:
        raise Unreadable("it is a Git LFS pointer, not the data: type git lfs pull in its repository")
    return READERS[file.suffix.lower()](file)


def _text(file: Path) -> str:
    """The file as UTF-8, without a byte order mark. Raises Unreadable with the line of the first other byte."""
    data = file.read_bytes()
    if data.startswith(UTF16):
        raise Unreadable("it is UTF-16: save it as UTF-8")
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise Unreadable(f"line {line}: byte 0x{data[error.start]:02x} is not UTF-8") from error


def _read_json(file: Path) -> list[Record]:
    """An array of objects, or an object a line."""
    text = _text(file)
    if text.lstrip().startswith("["):
        rows = enumerate(_parsed(text), 1)
        return [Record(f"row {number}", _object(row, f"row {number}")) for number, row in rows]
    if _spread(text):
        raise Unreadable("it is one JSON object over several lines: rows are an array of objects, or an object a line")
    found = []
    # Only \n ends a line: strings may hold U+2028, U+2029 and U+0085, at which splitlines() cuts.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            place = f"line {number}"
            found.append(Record(place, _object(_parsed(line, number), place)))
    return found


def _spread(text: str) -> bool:
    """Is the file one object over several lines? A second object ends the look at it."""
    try:
        return isinstance(json.loads(text), dict) and "\n" in text.strip()
    except (ValueError, RecursionError):
        return False


def _parsed(text: str, first_line: int = 1) -> Any:
    """Raises Unreadable with the line where `text`, which begins on `first_line`, is no JSON."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        # error.lineno counts \n, as this file does.
        where = f"line {first_line + error.lineno - 1}, character {error.colno}"
        raise Unreadable(f"{where}: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        # A number of thousands of digits, or lists within lists within lists.
        raise Unreadable(f"line {first_line}: {_first_line(error)}") from error


def _object(row: Any, place: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise Unreadable(f"{place} is {json.dumps(row)[:40]}: it must be a JSON object with the columns of one row")
    return row


def _read_csv(file: Path) -> list[Record]:
    """Values stay text: 007 is not 7. Every row has a value for every column of the header."""
    found: list[Record] = []
    header: list[str] = []
    with _long_fields():
        # strict refuses a quote that is never closed, as in a torn file.
        lines = csv.reader(io.StringIO(_text(file), newline=""), strict=True)
        try:
            for fields in lines:
                if not fields:
                    continue
                if not header:
                    header = fields
                    twice = [name for name in header if header.count(name) > 1]
                    if twice:
                        raise Unreadable(f"its header names {twice[0]!r} twice")
                    continue
                place = f"row {len(found) + 1}"
                if len(fields) != len(header):
                    raise Unreadable(
                        f"{place} has {len(fields)} field{'s' * (len(fields) > 1)}, and the header has {len(header)}: "
                        "quote fields that hold a comma or a line break"
                    )
                found.append(Record(place, dict(zip(header, fields, strict=True))))
        except csv.Error as error:
            raise Unreadable(f"row {len(found) + 1}: {error}") from error
    return found


@contextmanager
def _long_fields() -> Iterator[None]:
    """The module csv refuses fields of more than 131,072 characters; its limit is one for the whole process."""
    before = csv.field_size_limit(FIELD)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _read_parquet(file: Path) -> list[Record]:
    import pyarrow
    import pyarrow.parquet

    try:
        # The function read_table would take columns from the names of folders as well.
        with pyarrow.parquet.ParquetFile(file) as stored:
            table = stored.read()
    except pyarrow.ArrowException as error:
        raise Unreadable(_first_line(error)) from error
    return from_table(table)


def from_table(table: Any) -> list[Record]:
    """The rows of a pyarrow table. Raises Unreadable."""
    import pyarrow

    names = table.column_names
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise Unreadable(f"it has the column {twice[0]!r} twice")
    for name in [name for name in names if table.schema.field(name).type == pyarrow.float32()]:
        # Through text, a float of 32 bits stays the decimal that it stands for: 0.1, not 0.10000000149011612.
        exact = table[name].cast(pyarrow.string()).cast(pyarrow.float64())
        table = table.set_column(names.index(name), name, exact)
    return [Record(f"row {number}", row) for number, row in enumerate(_rows(table), 1)]


def _rows(table: Any) -> list[dict[str, Any]]:
    """Of a pyarrow table. Raises Unreadable with the row whose values are none."""
    try:
        return table.to_pylist()
    except ValueError as error:
        # Text that is not UTF-8, or a time that Python has no value for: the row is found one by one.
        for number in range(table.num_rows):
            try:
                table.slice(number, 1).to_pylist()
            except ValueError as cause:
                raise Unreadable(f"row {number + 1}: {_first_line(cause)}") from error
        raise


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


READERS: dict[str, Callable[[Path], list[Record]]] = {
    ".jsonl": _read_json,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
