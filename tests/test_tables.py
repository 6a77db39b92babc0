"""Texts of a file, one after the other and from any place."""

import json
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from ilse_embed.tables import SUFFIXES, TextFile, read_table, read_texts

TEXTS = ["plain", "", "caf\u00e9", "a, b", 'say "so"', "\u2028 \u0085", "\U0001f600", "last"]


def write(path: Path, newline: str = "\n", bom: bool = False) -> Path:
    """As each program may write it: with a byte order mark, with line ends of Windows, with no line end at the end."""
    lines = {
        ".txt": TEXTS,
        ".jsonl": [json.dumps({"id": i, "text": text}, ensure_ascii=False) for i, text in enumerate(TEXTS)],
        ".csv": ["id,text", *('{},"{}"'.format(i, text.replace('"', '""')) for i, text in enumerate(TEXTS))],
        ".tsv": ["id\ttext", *(f"{i}\t{text}" for i, text in enumerate(TEXTS))],
    }
    if path.suffix == ".parquet":
        parquet.write_table(pa.table({"id": list(range(8)), "text": TEXTS}), path, row_group_size=3)
    else:
        path.write_bytes(("\ufeff" * bom + newline.join(lines[path.suffix])).encode())
    return path


@pytest.mark.parametrize("bom", [False, True])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_from_any_place(tmp_path: Path, suffix: str, newline: str, bom: bool) -> None:
    file = TextFile(write(tmp_path / f"a{suffix}", newline, bom), id_column=None if suffix == ".txt" else "id")
    records = list(file.records())
    assert [record.text for record in records] == TEXTS == read_texts(file.path)
    if suffix != ".txt":
        assert [record.id for record in records] == [str(number) for number in range(8)]
        assert read_table(file.path)["text"] == TEXTS
    for number, record in enumerate(records, 1):
        assert list(file.records(record.end)) == records[number:]


def test_line_breaks_in_quotes(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'text,id\n"one\r\ntwo\n\nthree",a\n\nfour,b\n"five\n",c')
    file = TextFile(path, "text", "id")
    records = list(file.records())
    assert [(record.text, record.id) for record in records] == [
        ("one\ntwo\n\nthree", "a"),
        ("four", "b"),
        ("five\n", "c"),
    ]
    assert list(file.records(records[0].end)) == records[1:]


def test_what_a_worker_sees(tmp_path: Path) -> None:
    """From a place in the middle: the header behind blank lines, the column that the first row decides."""
    path = tmp_path / "a.csv"
    path.write_text("\n\nid,text\n1,one\n,two\n")
    records = list(TextFile(path, id_column="id").records())
    assert list(TextFile(path, id_column="id").records(records[0].end)) == records[1:]
    path = tmp_path / "a.jsonl"
    path.write_text('{"sentence": "one"}\n{"sentence": "two", "id": null}\n')
    file = TextFile(path).settled()
    first, second = file.records()
    assert file.column == "sentence" and list(file.records(first.end)) == [second]
    assert [record.id for record in TextFile(path, "sentence", "id").records(first.end)] == [None]
    (tmp_path / "empty.jsonl").touch()
    empty = TextFile(tmp_path / "empty.jsonl")
    assert empty.settled() == empty and list(empty.records(may_be_empty=True)) == []


def test_a_very_long_field(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text\n" + "x" * 300_000 + "\n")
    assert len(read_texts(tmp_path / "a.csv")[0]) == 300_000


def test_lines_of_a_large_file_are_not_held(tmp_path: Path) -> None:
    """The first text is there before the fault in the last line is found."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "first"}\n' * 1000 + "{broken")
    records = TextFile(path).records()
    assert next(records).text == "first"
    with pytest.raises(ValueError, match="line 1001, cannot be read as jsonl"):
        list(records)


def test_a_column_of_identifiers_that_is_not_there(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv")
    with pytest.raises(ValueError, match="has no column 'key'; it has 'id', 'text'"):
        list(TextFile(path, "text", "key").records())
