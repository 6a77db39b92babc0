"""Files with texts: read, and checked so that a fault is named with its row."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

SUFFIXES = (".txt", ".jsonl", ".csv", ".tsv", ".parquet")
"""Files that are read: txt is a text a line; the others are tables; csv may have line breaks in quotes, tsv none."""


@dataclass(frozen=True)
class Record:
    """A text of a file.

    Attributes:
        text: The text.
        id: Its value in the column of identifiers, or None.
        end: The place behind it, from which `TextFile.records` can go on.
    """

    text: str
    id: str | None
    end: int


@dataclass(frozen=True)
class TextFile:
    """Texts of a file of any size, read one after the other.

    Attributes:
        path: The file, in UTF-8; its name ends in one of `SUFFIXES`. In txt an empty line is an empty text.
        column: Column of the texts in a table; by default "text", or the only one.
        id_column: Column of identifiers to carry along.
    """

    path: Path
    column: str | None = None
    id_column: str | None = None

    def settled(self) -> TextFile:
        """The same with the column named, as the first row decides it."""
        first = next(stream_rows(self.path, may_be_empty=True), None)
        return self if first is None else replace(self, column=self._column(first[0]))

    def _column(self, row: Mapping[str, Any]) -> str:
        return self.column or (next(iter(row)) if len(row) == 1 else "text")

    def records(self, start: int = 0, *, may_be_empty: bool = False) -> Iterator[Record]:
        """Texts from a place on.

        Args:
            start: A place that a record ended at; 0 is the first row.
            may_be_empty: Whether a file without rows is one without texts; else it is refused.

        Raises:
            FileNotFoundError: If the file is not there.
            ValueError: If there is no such column or a value is no text, and as in `stream_rows`.
        """
        column = ""
        for number, (row, end) in enumerate(stream_rows(self.path, start, may_be_empty=may_be_empty), 1):
            if number == 1:
                column = self._column(row)
                for name in filter(None, (column, self.id_column)):
                    pick_column(self.path, {key: [] for key in row}, name)
            text = row.get(column)
            if not isinstance(text, str):
                raise ValueError(
                    f"{self.path}: column {column!r} takes texts; row {number} (without the header) has {text!r}; "
                    "correct or remove it"
                )
            key = None if self.id_column is None else row.get(self.id_column)
            yield Record(text, None if key is None else str(key), end)


def read_texts(path: str | Path, column: str | None = None) -> list[str]:
    """All texts of a file; see `TextFile`.

    Raises:
        FileNotFoundError: If the file is not there.
        ValueError: As in `TextFile.records`.
    """
    return [record.text for record in TextFile(Path(path), column).records()]


def read_table(path: str | Path) -> dict[str, list[Any]]:
    """The columns of a file.

    Raises:
        FileNotFoundError: If the file is not there.
        ValueError: As in `stream_rows`.
    """
    rows = [row for row, _ in stream_rows(Path(path))]
    return {column: [row.get(column) for row in rows] for column in dict.fromkeys(key for row in rows for key in row)}


def stream_rows(path: Path, start: int = 0, *, may_be_empty: bool = False) -> Iterator[tuple[dict[str, Any], int]]:
    """Rows of a jsonl, csv, tsv (no quoting) or parquet file; a line of a txt file is a row with the column ``text``.

    Args:
        path: The file.
        start: A place that an earlier pass told; 0 is the first row.
        may_be_empty: Whether a file may have no rows.

    Yields:
        A row, and the place behind it: a row number in parquet, a position in bytes else.

    Raises:
        FileNotFoundError: If the file is not there.
        ValueError: If it is empty or cannot be read as what its suffix says.
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"{path} ends in {suffix!r}; allowed are .txt (texts alone), .jsonl, .csv, .tsv and .parquet")
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    rows = {".parquet": _parquet_rows, ".txt": _txt_rows, ".jsonl": _jsonl_rows}.get(suffix, _separated_rows)
    found = start > 0 or may_be_empty
    lines = _Lines(path)
    try:
        for row in rows(path, lines, start):
            found = True
            yield row
    except (TypeError, ValueError, csv.Error) as error:  # wrong encoding and broken parquet are ValueErrors too
        where = f"{path}, line {lines.number}," if suffix == ".jsonl" and not start else f"{path}"
        raise ValueError(f"{where} cannot be read as {suffix[1:]} in UTF-8 ({error}); convert or correct it") from error
    if not found:
        raise ValueError(f"{path} has no rows; it needs at least one (beside the header)")


class _Lines:
    """Lines of a file, decoded one after the other, and the place behind the last one."""

    def __init__(self, path: Path) -> None:
        self.path, self.place, self.number = path, 0, 0

    def read(self, start: int = 0) -> Iterator[str]:
        with self.path.open("rb") as file:
            self.place = file.seek(start)
            for line in file:
                self.number += 1
                text = line.decode("utf-8-sig" if self.place == 0 else "utf-8")
                self.place += len(line)
                yield text[:-2] + "\n" if text.endswith("\r\n") else text


Rows = Iterator[tuple[dict[str, Any], int]]


def _txt_rows(path: Path, lines: _Lines, start: int) -> Rows:
    for line in lines.read(start):
        yield {"text": line.removesuffix("\n")}, lines.place


def _jsonl_rows(path: Path, lines: _Lines, start: int) -> Rows:
    for line in lines.read(start):
        if line.strip():
            yield {**json.loads(line)}, lines.place


def _separated_rows(path: Path, lines: _Lines, start: int) -> Rows:
    tab = path.suffix.lower() == ".tsv"
    if not start:
        for row in separated(lines.read(), tab=tab):
            yield row, lines.place
        return
    header = next(filter(None, _csv_reader(lines.read(), tab=tab)))
    for row in separated(lines.read(start), tab=tab, header=header):
        yield row, lines.place


def _parquet_rows(path: Path, lines: _Lines, start: int) -> Rows:
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        number = 0
        for group in range(file.num_row_groups):
            behind = number + file.metadata.row_group(group).num_rows
            if behind <= start:
                number = behind
                continue
            for batch in file.iter_batches(1024, row_groups=[group]):
                for row in batch.to_pylist():
                    number += 1
                    if number > start:
                        yield row, number


def separated(lines: Iterable[str], *, tab: bool, header: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """Rows of csv, or of tsv without quoting, under the names of the header, which is the first row if not given.

    Raises:
        ValueError: If a row has more or fewer fields than the header.
    """
    number = 0
    for row in filter(None, _csv_reader(lines, tab=tab)):
        if header is None:
            header = row
            continue
        number += 1
        if len(row) != len(header):
            raise ValueError(f"row {number} has {len(row)} fields, the header {len(header)}")
        yield dict(zip(header, row, strict=True))


def _csv_reader(lines: Iterable[str], *, tab: bool) -> Iterator[list[str]]:
    options: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if tab else {"strict": True}
    csv.field_size_limit(2**31 - 1)  # a text may be long
    return csv.reader(lines, **options)


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
