"""Files with texts: read, and checked so that a fault is named with its row."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def read_texts(path: str | Path, column: str | None = None) -> list[str]:
    """Texts of a file: txt (one a line; an empty line is an empty text), or a column of jsonl, csv, tsv or parquet.

    Args:
        path: The file, in UTF-8.
        column: Column of a table; by default "text", or the only one.

    Raises:
        FileNotFoundError: If the file is not there.
        ValueError: As in `load_files`.
    """
    path = Path(path)
    table = read_table(path)
    only = next(iter(table)) if len(table) == 1 else "text"
    return as_texts(path, pick_column(path, table, column or only))


def read_table(path: str | Path) -> dict[str, list[Any]]:
    """The columns of a jsonl, csv, tsv (no quoting) or parquet file; a txt file is one column ``text``.

    Raises:
        FileNotFoundError: If the file is not there.
        ValueError: If it is empty or cannot be read as what its suffix says.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in (".txt", ".jsonl", ".csv", ".tsv", ".parquet"):
        raise ValueError(f"{path} ends in {suffix!r}; allowed are .txt (texts alone), .jsonl, .csv, .tsv and .parquet")
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    number, rows = 0, []
    try:
        content = "" if suffix == ".parquet" else path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
        lines = content.removesuffix("\n").split("\n") if content else []
        if suffix == ".parquet":
            from pyarrow import parquet

            rows = parquet.read_table(path).to_pylist()
        elif suffix == ".txt":
            rows = [{"text": line} for line in lines]
        elif suffix == ".jsonl":
            for number, line in enumerate(lines, 1):  # noqa: B007 (the except clause uses it)
                rows += [{**json.loads(line)}] if line.strip() else []
        else:
            rows = separated(content, tab=suffix == ".tsv")
    except (TypeError, ValueError, csv.Error) as error:  # wrong encoding and broken parquet are ValueErrors too
        where = f"{path}, line {number}," if number else f"{path}"
        raise ValueError(f"{where} cannot be read as {suffix[1:]} in UTF-8 ({error}); convert or correct it") from error
    if not rows:
        raise ValueError(f"{path} has no rows; it needs at least one (beside the header)")
    return {column: [row.get(column) for row in rows] for column in dict.fromkeys(key for row in rows for key in row)}


def separated(content: str, *, tab: bool) -> list[dict[str, Any]]:
    """Rows of csv, or of tsv without quoting, under the names of the header.

    Raises:
        ValueError: If a row has more or fewer fields than the header.
    """
    options: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if tab else {"strict": True}
    header, *rows = [row for row in csv.reader(io.StringIO(content, newline=""), **options) if row] or [[]]
    for number, row in enumerate(rows, 1):
        if len(row) != len(header):
            raise ValueError(f"row {number} has {len(row)} fields, the header {len(header)}")
    return [dict(zip(header, row, strict=True)) for row in rows]


Column = tuple[str, list[Any]]


def pick_column(path: Path, table: Mapping[str, list[Any]], column: str) -> Column:
    """A column and its name.

    Raises:
        ValueError: If there is none of that name.
    """
    if column not in table:
        raise ValueError(
            f"{path} has no column {column!r}; it has {few(list(table), 20)}. Usual are text and label, or "
            "sentence1, sentence2 and score; name yours if they are called otherwise (text=..., label=...)"
        )
    return column, table[column]


def as_texts(path: Path, column: Column) -> list[str]:
    """The column as texts; an empty text is one, a missing value is refused with its row."""
    return _checked(path, column, lambda value: isinstance(value, str), "texts")


def as_labels(path: Path, column: Column) -> list[str]:
    """The column as class names; an empty or missing value is refused with its row."""
    values = _checked(path, column, lambda value: value is not None and value != "" and value == value, "labels")
    return [str(value) for value in values]


def as_scores(path: Path, column: Column, score_range: tuple[float, float] | None) -> NDArray[np.float64]:
    """The column as finite numbers, within the range if there is one; anything else is refused with its row."""
    low, high = score_range or (-math.inf, math.inf)

    def is_score(value: Any) -> bool:
        try:
            return math.isfinite(float(value)) and low <= float(value) <= high
        except (TypeError, ValueError):
            return False

    allowed = "finite numbers" if score_range is None else f"numbers from {low:g} to {high:g}"
    return np.array([float(value) for value in _checked(path, column, is_score, allowed)])


def _checked(path: Path, column: Column, right: Callable[[Any], bool], allowed: str) -> list[Any]:
    name, values = column
    if rows := [number for number, value in enumerate(values, 1) if not right(value)]:
        raise ValueError(
            f"{path}: column {name!r} takes {allowed}; {len(rows)} rows have something else or nothing, for example "
            f"{values[rows[0] - 1]!r} (rows {few(rows)}, without the header); correct or remove them"
        )
    return values


def few(values: Sequence[Any], limit: int = 5) -> str:
    """The first few values, for a message."""
    more = f" and {len(values) - limit} more" if len(values) > limit else ""
    return ", ".join(repr(value) for value in values[:limit]) + more
