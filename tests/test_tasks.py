"""Tasks: mirrors, built-in tasks, own files with every fault that an error message should name."""

import csv
import json
import logging
from collections import Counter
from pathlib import Path

import datasets
import mteb
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from ilse_embed.tables import read_texts
from ilse_embed.tasks import QUICKSTART, Labelled, Pairs, Task, at_most, few_shot, load_files, load_task

SHARED = Path(__file__).parents[2] / "shared/data/mteb"

CLASSIFICATION = [{"text": f"Request {i} of kind {i % 4}.", "label": f"kind-{i % 4}"} for i in range(40)]
STS = [{"sentence1": f"A {i}.", "sentence2": f"B {i % 7}.", "score": (i % 11) / 2} for i in range(40)]


def write(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = list(rows[0])
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".tsv":
        lines = ["\t".join(columns), *("\t".join(str(row[c]) for c in columns) for row in rows)]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    else:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)
    return path


def write_bytes(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


# ------------------------------------------------------------------------------------------------------- mirrors


@pytest.mark.parametrize(
    ("name", "splits", "classes"),
    [
        ("Banking77Classification", (8505, 1498, 3080), 77),
        ("EmotionClassification", (16000, 2000, 2000), 6),
        ("MTOPDomainClassification", (15667, 2235, 4386), 11),
        ("MTOPIntentClassification", (15667, 2235, 4386), 113),
        ("PoemSentimentClassification", (892, 105, 104), 4),
        ("STSBenchmark", (5749, 1500, 1379), None),
        ("STS12", (3108,), None),
        ("STS13", (1500,), None),
        ("STS14", (3750,), None),
        ("STS15", (3000,), None),
        ("STS16", (1186,), None),
        ("BIOSSES", (100,), None),
        ("SICK-R", (9927,), None),
    ],
)
@pytest.mark.skipif(not SHARED.is_dir(), reason="the mirror of the benchmark data is not here")
def test_shared_mirror(name: str, splits: tuple[int, ...], classes: int | None) -> None:
    task = load_task(name, SHARED)
    assert tuple(len(rows) for rows in task.splits.values()) == splits
    assert tuple(task.splits) == (("test",) if len(splits) == 1 else ("train", "validation", "test"))
    assert len(task.revision) == 40 and task.source.endswith("(mirror)")
    if classes is None:
        assert task.kind == "sts" and task.score_range == (0.0, 5.0)
        with pytest.raises(ValueError, match="only classification has labels"):
            task.labels  # noqa: B018
    else:
        assert task.kind == "classification" and len(task.labels) == classes
        assert not any(label.isdigit() for label in task.labels)


def test_mirror_without_validation_split(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"text": f"t{i}", "label": i % 3, "label_text": f"class {i % 3}"} for i in range(60)]
    rows += [{"text": "t0", "label": 0, "label_text": "class 0"}] * 4  # equal texts must stay on one side
    write(tmp_path / "Banking77Classification/train.parquet", rows)
    write(tmp_path / "Banking77Classification/test.parquet", [*rows[5:7], {**rows[0], "text": "new"}])
    with caplog.at_level(logging.INFO, logger="ilse_embed"):
        task = load_task("Banking77Classification", tmp_path)
    assert "2 of 64 training rows occur in the test split" in caplog.text
    train, validation = task.splits["train"], task.splits["validation"]
    assert Counter(validation.labels) in (
        Counter({"class 0": 3, "class 1": 3, "class 2": 3}),
        Counter({"class 0": 7, "class 1": 3, "class 2": 3}),  # t0 was drawn, and its copies came along
    )
    assert not set(train.texts) & set(validation.texts) and len(train) + len(validation) == 64
    assert task.labels == ["class 0", "class 1", "class 2"]

    def again(seed: int) -> list[str]:
        return load_task("Banking77Classification", tmp_path, seed=seed).splits["validation"].texts

    assert again(42) == validation.texts != again(43)


def test_mirror_labels_from_manifest_or_numbers(tmp_path: Path) -> None:
    """Ids keep their meaning where a split lacks a label."""
    mirror = tmp_path / "mirror"
    for split, labels in {"train": [0, 1, 2], "validation": [2], "test": [2, 1]}.items():
        rows = [{"text": f"{split} {label}", "label": label} for label in labels]
        write(mirror / f"PoemSentimentClassification/{split}.parquet", rows)
    plain = load_task("PoemSentimentClassification", mirror)
    assert plain.labels == ["0", "1", "2"] and plain.splits["test"].labels == ["2", "1"]
    manifest = {"PoemSentimentClassification": {"label_names": ["bad", "good", "none", "mixed"]}}
    for place in (tmp_path, mirror):
        (place / "manifest.json").write_text(json.dumps(manifest))
        named = load_task("PoemSentimentClassification", mirror)
        assert named.labels == ["bad", "good", "none"] and named.splits["test"].labels == ["none", "good"]
        (place / "manifest.json").unlink()


def test_mirror_pairs_do_not_leak(tmp_path: Path) -> None:
    rows = [{"sentence1": f"a{i % 30}", "sentence2": f"b{i % 30}", "score": 1.0} for i in range(60)]
    rows[30:] = [{**row, "sentence1": row["sentence2"], "sentence2": row["sentence1"]} for row in rows[30:]]
    write(tmp_path / "STSBenchmark/train.parquet", rows)
    write(tmp_path / "STSBenchmark/test.parquet", rows[:1])
    task = load_task("STSBenchmark", tmp_path)
    sides = [
        {frozenset(pair) for pair in zip(rows.sentence1, rows.sentence2, strict=True)}
        for rows in (task.splits["train"], task.splits["validation"])
    ]
    assert len(task.splits["validation"]) == 6 and not sides[0] & sides[1]
    assert task.texts("test") == ["a0", "b0"] and len(task.texts("train", "validation")) == len(task.texts()) == 60


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("STS99", ValueError, "no English task 'STS99'.*quickstart-sts"),
        ("ArguAna", ValueError, "type Retrieval; allowed are STS, Classification"),
        ("STS13", FileNotFoundError, r"STS13/<split>.parquet; that mirror has 'STS12'"),
    ],
)
def test_load_task_refuses(tmp_path: Path, name: str, error: type[Exception], words: str) -> None:
    write(tmp_path / "STS12/test.parquet", STS)
    with pytest.raises(error, match=words):
        load_task(name, tmp_path)


@pytest.mark.parametrize(
    ("name", "subset", "rows"),
    [("STSBenchmark", None, STS), ("MTOPDomainClassification", "en", CLASSIFICATION)],
)
def test_from_the_hub(monkeypatch: pytest.MonkeyPatch, name: str, subset: str | None, rows: list[dict]) -> None:
    """What is asked of the hub: mteb's path and revision, and the English subset."""
    asked: list[dict] = []

    def load_dataset(**options: object) -> datasets.DatasetDict:
        asked.append(options)
        return datasets.DatasetDict({split: datasets.Dataset.from_list(rows) for split in ("train", "test")})

    monkeypatch.setattr("mteb.abstasks.abstask.load_dataset", load_dataset)
    task = load_task(name)
    official = mteb.get_task(name).metadata.dataset
    assert asked == [official | {"num_proc": None} | ({"name": subset} if subset else {})]
    assert (task.source, task.revision) == (official["path"], official["revision"])
    assert [len(split) for split in task.splits.values()] == [36, 4, 40] if subset is None else [32, 8, 40]


# ------------------------------------------------------------------------------------------- built-in, few-shot, Task


@pytest.mark.parametrize(
    ("name", "sizes"), [("quickstart-sts", (300, 75, 125)), ("quickstart-intents", (380, 100, 200))]
)
def test_quickstart(name: str, sizes: tuple[int, ...]) -> None:
    task = load_task(name)
    assert name in QUICKSTART and tuple(len(rows) for rows in task.splits.values()) == sizes
    if task.kind == "sts":
        assert task.score_range == (0.0, 5.0)
        assert all(rows.scores.min() >= 0 and rows.scores.max() <= 5 for rows in task.splits.values())
    else:
        assert len(task.labels) == 20 and "track_parcel" in task.labels
    assert not set(task.texts("train")) & set(task.texts("test"))


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("shots", [1, 3, 1000])
def test_few_shot(shots: int, whole: bool) -> None:
    task = load_task("quickstart-intents")
    few = few_shot(task, shots, seed=0, whole_validation=whole)
    for split, limit in (("train", shots), ("validation", 10**9 if whole else shots)):
        full = Counter(task.splits[split].labels)
        assert Counter(few.splits[split].labels) == {label: min(limit, count) for label, count in full.items()}
        assert set(few.splits[split].texts) <= set(task.splits[split].texts)
        again = few_shot(task, shots, seed=0, whole_validation=whole).splits[split]
        assert few.splits[split].texts == again.texts
        assert set(few.splits[split].texts) <= set(
            few_shot(task, shots + 1, seed=0, whole_validation=whole).texts(split)
        )
    assert few.splits["test"] is task.splits["test"] and few.labels == task.labels and few.shots == shots
    assert task.shots is None
    if shots < 10:
        assert few.splits["train"].texts != few_shot(task, shots, seed=1).splits["train"].texts


@pytest.mark.parametrize(("name", "shots"), [("quickstart-sts", 8), ("quickstart-intents", 0)])
def test_few_shot_refuses(name: str, shots: int) -> None:
    with pytest.raises(ValueError, match=f"of each class, at least 1, of a classification task .* got {shots}"):
        few_shot(load_task(name), shots, seed=0)


@pytest.mark.parametrize("name", ["quickstart-intents", "quickstart-sts"])
def test_at_most(name: str) -> None:
    task = load_task(name)
    some = at_most(task, 30, seed=0)
    assert len(some.splits["train"]) == 30 and some.splits["validation"] is task.splits["validation"]
    assert some.texts("train") == at_most(task, 30, seed=0).texts("train") != at_most(task, 30, seed=1).texts("train")
    assert at_most(task, 10**6, seed=0) is task
    if name == "quickstart-intents":
        assert some.labels == task.labels  # each class has a text
        with pytest.raises(ValueError, match="needs one of each class: 20"):
            at_most(task, 19, seed=0)
    with pytest.raises(ValueError, match="no train split"):
        at_most(Task("toy", "sts", {"test": task.splits["test"]}, (0, 1), ""), 5, seed=0)


def test_unseen_labels_and_lengths() -> None:
    splits = {"train": Labelled(["a", "b"], ["x", "y"]), "test": Labelled(["c"], ["z"])}
    with pytest.raises(ValueError, match=r"split 'test' has labels that no training text has: 'z'"):
        Task("t", "classification", splits, None, "here").labels  # noqa: B018
    assert Task("t", "classification", {"test": splits["test"]}, None, "here").labels == ["z"]
    with pytest.raises(ValueError, match="2 texts but 1 labels"):
        Labelled(["a", "b"], ["x"])
    with pytest.raises(ValueError, match="2 scores"):
        Pairs(["a"], ["b"], np.zeros(2))


# --------------------------------------------------------------------------------------------------------- own files


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".tsv", ".parquet"])
def test_load_files(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"mine{suffix}", CLASSIFICATION)
    task = load_files(path, test=path)
    assert (task.name, task.kind, task.source, task.score_range) == ("mine", "classification", str(path), None)
    assert {split: len(rows) for split, rows in task.splits.items()} == {"train": 32, "validation": 8, "test": 40}
    assert task.labels == [f"kind-{i}" for i in range(4)]
    assert task.splits["test"].texts == [row["text"] for row in CLASSIFICATION]

    path = write(tmp_path / f"pairs{suffix}", STS)
    task = load_files(path, path, name="my pairs")
    assert (task.name, task.kind, task.score_range) == ("my pairs", "sts", (0.0, 5.0))
    assert task.splits["validation"].scores.tolist() == [row["score"] for row in STS]
    assert load_files(path, score_range=(0, 10)).score_range == (0, 10)


def test_load_files_with_other_names(tmp_path: Path) -> None:
    rows = [{"utterance": row["text"], "text": i, "intent": i % 2, "label": ""} for i, row in enumerate(CLASSIFICATION)]
    path = write(tmp_path / "train.parquet", rows)
    task = load_files(path, text="utterance", label="intent")
    assert task.labels == ["0", "1"] and task.splits["train"].texts[0].startswith("Request")
    path = write(tmp_path / "sts.csv", [{"a": "x", "b": "y", "gold": 1}, {"a": "z", "b": "y", "gold": 3}])
    task = load_files(path, path, sentence1="a", sentence2="b", score="gold")
    assert task.texts() == ["x", "y", "z"] and task.score_range == (1.0, 3.0)


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_hostile_texts_come_through(tmp_path: Path, suffix: str) -> None:
    texts = [
        'quote " and, comma',
        "line\nbreak",
        "tab\there",
        "",
        "NA",
        "null",
        "漢字 العربية 😀",
        "\u2028 \x0b",
        "1e5",
        "  ",
    ]
    rows = [{"text": text, "label": "a" if i % 2 else "b"} for i, text in enumerate(texts)]
    path = write(tmp_path / f"hostile{suffix}", rows)
    task = load_files(path, path)
    assert task.splits["train"].texts == texts
    assert read_texts(path) == texts


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.xlsx", b"x", r"ends in '.xlsx'; allowed are .*\.jsonl, \.csv, \.tsv and \.parquet"),
        ("a.csv", b"", "has no rows"),
        ("a.jsonl", b"\n\n", "has no rows"),
        ("a.csv", b"text,label\n", "has no rows"),
        ("a.csv", b"txt,label\nx,y\n", r"no column 'sentence1'; it has 'txt', 'label'.*name yours"),
        ("a.csv", "text,label\ncafé,y\n".encode("latin1"), "cannot be read as csv in UTF-8.*0xe9.*convert"),
        ("a.csv", b"text,label\na,b\nx,y,z\n", "row 2 has 3 fields, the header 2"),
        ("a.csv", b'text,label\n"open,y\n', "cannot be read as csv"),
        ("a.csv", b"text,label\nx,\ny,b\n", r"'label' takes labels; 1 rows .* '' \(rows 1, without the header\)"),
        ("a.tsv", b"text\tlabel\nonly one\n", "row 1 has 1 fields"),
        ("a.jsonl", b'{"text": "x", "label": "y"}\n{"text": \n', "line 2, cannot be read as jsonl"),
        ("a.jsonl", b'{"text": "x", "label": "y"}\n[1, 2]\n', "line 2, cannot be read as jsonl"),
        ("a.jsonl", b'{"text": "x", "label": "y"}\n{"label": "y"}\n', r"'text' takes texts; .* None \(rows 2,"),
        ("a.jsonl", b'{"text": 5, "label": "y"}\n', r"'text' takes texts; .* 5 \(rows 1,"),
        ("a.jsonl", b'{"text": "x", "label": null}\n', r"'label' takes labels; .* None"),
        ("a.jsonl", b'{"sentence1": "x", "sentence2": "y", "score": NaN}\n', r"'score' takes finite numbers; .* nan"),
        (
            "a.csv",
            b"sentence1,sentence2,score\nx,y,3\nx,z,high\n",
            r"'score' takes finite numbers; .* 'high' \(rows 2,",
        ),
        ("a.csv", b"sentence1,sentence2,score\nx,y,\n", r"'score' takes finite numbers; .* ''"),
        ("a.csv", b"sentence1,sentence2\nx,y\n", "no column 'score'"),
        ("a.parquet", b"PAR1 no", "cannot be read as parquet"),
        ("a.csv", b"text,label\nx,y\n", "1 rows are too few to hold some out; give a validation split"),
    ],
)
def test_load_files_names_the_fault(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    path = write_bytes(tmp_path / name, content)
    with pytest.raises(ValueError, match=words) as caught:
        load_files(path)
    assert name in str(caught.value) or "too few" in words


def test_load_files_other_refusals(tmp_path: Path) -> None:
    path = write(tmp_path / "sts.jsonl", STS)
    with pytest.raises(ValueError, match=r"'score' takes numbers from 0 to 1; 28 rows .* and 23 more"):
        load_files(path, score_range=(0, 1))
    with pytest.raises(FileNotFoundError, match="there is no file"):
        load_files(tmp_path / "nothing.csv")
    other = write(tmp_path / "test.jsonl", CLASSIFICATION)
    with pytest.raises(ValueError, match=r"test.jsonl has no column 'sentence1'; it has 'text', 'label'"):
        load_files(path, test=other)


# ------------------------------------------------------------------------------------------------------------- texts


def test_read_texts(tmp_path: Path) -> None:
    path = write_bytes(tmp_path / "a.txt", "\ufeffone\r\n\r\nthree\u2028still three\r\n".encode())
    assert read_texts(path) == ["one", "", "three\u2028still three"]
    assert read_texts(write(tmp_path / "a.csv", [{"body": "x"}, {"body": "y"}])) == ["x", "y"]
    pairs = write(tmp_path / "a.parquet", STS)
    assert read_texts(pairs, "sentence2")[:2] == ["B 0.", "B 1."]
    with pytest.raises(ValueError, match=r"no column 'text'; it has 'sentence1', 'sentence2', 'score'"):
        read_texts(pairs)
    with pytest.raises(ValueError, match="has no rows"):
        read_texts(write_bytes(tmp_path / "b.txt", b""))
    with pytest.raises(ValueError, match=r"in UTF-8.*0xff"):
        read_texts(write_bytes(tmp_path / "c.txt", b"\xff\xfe"))
