"""`ilse extract`, `ilse store` and `ilse encode` into a folder: what they tell, write and refuse."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Ilse, assert_refused
from pyarrow import parquet

from ilse_embed import LayerTransformer, load
from ilse_embed.extraction import extract
from ilse_embed.store import FeatureStore
from ilse_embed.tasks import load_task

TEXTS = [f"Text number {number}{' and so on' * (number % 5)}." for number in range(40)]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"id": f"d{i}", "text": text}) + "\n" for i, text in enumerate(TEXTS)))
    return path


@pytest.fixture
def extracted(ilse: Ilse, tiny_backbone: Callable[..., Path], texts: Path, tmp_path: Path) -> Path:
    assert ilse("extract", tiny_backbone(), texts, "--output", tmp_path / "stores").code == 0
    (folder,) = (tmp_path / "stores").iterdir()
    return folder


# -------------------------------------------------------------------------------------------------------------- extract


def test_extract(ilse: Ilse, tiny_backbone: Callable[..., Path], texts: Path, mirror: Path, tmp_path: Path) -> None:
    """Files and tasks together; first only the plan; then all; then nothing is left to do."""
    command = ("extract", tiny_backbone(), texts, "STSBenchmark", "--data-dir", mirror, "--output", tmp_path / "s")
    task = load_task("STSBenchmark", mirror)
    number = len({*TEXTS, *task.texts()})
    planned = ilse(*command, "--dry-run", "--json", tmp_path / "plan.json")
    assert planned.code == 0, planned.error
    assert f"{number} distinct texts, {number} to extract" in planned.out and "Nothing was extracted" in planned.out
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert not list((tmp_path / "s").glob("*/*.safetensors"))

    done = ilse(*command, "--json", tmp_path / "done.json")
    assert done.code == 0 and f"{number} texts in" in done.out and "tokens/s" in done.out
    report = json.loads((tmp_path / "done.json").read_text())
    assert report["tokens"] == plan["tokens"] > number and report["bytes"] == plan["bytes"]
    (folder,) = (tmp_path / "s").iterdir()
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert abs(size - plan["bytes"]) < 500
    backbone = LayerTransformer(str(tiny_backbone()))
    expected = extract(backbone, TEXTS).layers
    torch.testing.assert_close(FeatureStore.open(folder).table(TEXTS).layers, expected, atol=1e-5, rtol=1e-5)

    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    again = ilse(*command)
    assert f"{number} distinct texts, 0 to extract" in again.out
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    trained = ilse(
        *("train", "--task", "STSBenchmark", "--data-dir", mirror, "--backbone", tiny_backbone(), "--epochs", 1),
        *("--hidden", 8, "--store", tmp_path / "s", "--output", tmp_path / "model"),
    )
    assert trained.code == 0, trained.error
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before  # and training finds them


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        (("--dtype", "bfloat16"), {"dtype": "bfloat16"}),
        (("--compress", 5), {"compress": 5}),
        (("--prompt", "query: "), {"prompt": "query: ", "include_prompt": True}),
        (("--pooling", "mean_without_first", "--max-seq-length", 7), {"max_seq_length": 7}),
        (("--backbone-dtype", "bfloat16"), {"model_dtype": "bfloat16"}),
    ],
)
def test_extract_options(
    ilse: Ilse, tiny_backbone: Callable[..., Path], texts: Path, tmp_path: Path, options: Any, facts: dict[str, Any]
) -> None:
    assert ilse("extract", tiny_backbone(), texts, "--output", tmp_path / "s", *options).code == 0
    (folder,) = (tmp_path / "s").iterdir()
    store = FeatureStore.open(folder)
    assert len(store) == len(TEXTS) and store.facts | facts == store.facts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("{backbone}", "absent.txt"), "there is no file absent.txt"),
        (("{backbone}", "STSBenchmrak"), "mteb has no English task 'STSBenchmrak'"),
        (("{backbone}", "texts.jsonl", "--column", "titel"), "has no column 'titel'; it has 'id', 'text'"),
        (("{backbone}", "texts.jsonl", "--dtype", "int8"), "dtype is 'int8'; allowed are"),
        (("{backbone}", "texts.jsonl", "--backbone-dtype", "int8"), "dtype is 'int8'; allowed are"),
        (("{backbone}", "texts.jsonl", "--compress", "64"), "compress is 64; allowed are widths from 1 to"),
        (("{backbone}", "texts.jsonl", "--pooling", "max"), "pooling is 'max'; allowed are"),
        (("{backbone}", "texts.jsonl", "--engine", "dask"), 'engine is \'dask\'; allowed are "local" and "ray"'),
        (("/no/such/backbone", "texts.jsonl"), "/no/such/backbone"),
    ],
)
def test_extract_refuses(
    ilse: Ilse, tiny_backbone: Callable[..., Path], texts: Path, tmp_path: Path, arguments: Any, message: str
) -> None:
    given = (part.format(backbone=tiny_backbone()) for part in arguments)
    assert_refused(ilse("extract", *given, "--output", tmp_path / "s"), message)
    assert not (tmp_path / "s").exists()


# ---------------------------------------------------------------------------------------------------------------- store


def test_store_ls(ilse: Ilse, extracted: Path, tiny_backbone: Callable[..., Path], texts: Path) -> None:
    assert ilse("extract", tiny_backbone(), texts, "--output", extracted.parent, "--compress", 5).code == 0
    shown = ilse("store", "ls", extracted.parent).out
    assert "4 x 32" in shown and "4 x 5 (compressed)" in shown and shown.count(" 40 ") == 2
    assert "4 x 5" not in ilse("store", "ls", extracted).out


@pytest.mark.parametrize("what", ["shard", "note", "both"])
def test_store_verify(ilse: Ilse, extracted: Path, what: str) -> None:
    sound = ilse("store", "verify", extracted.parent)
    assert sound.code == 0 and f"sound: {extracted} (1 shards)" in sound.out
    (shard,) = extracted.glob("*.safetensors")
    damaged = {"shard": [shard], "note": [extracted / "store.json"], "both": [shard, extracted / "store.json"]}[what]
    for path in damaged:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    found = ilse("store", "verify", extracted)
    assert found.code == 1 and "Traceback" not in found.error
    assert all(f"damaged: {path}" in found.out for path in damaged) and f"{len(damaged)} damaged files" in found.out
    if "note" not in what:
        assert ilse("store", "ls", extracted).code == 0
    else:
        assert " damaged " in ilse("store", "ls", extracted).out


def test_store_rm(ilse: Ilse, extracted: Path) -> None:
    (extracted / "notes.txt").write_text("mine")
    assert ilse("store", "rm", extracted, "--yes").code == 0
    assert [path.name for path in extracted.iterdir()] == ["notes.txt"]
    assert_refused(ilse("store", "rm", extracted, "--yes"), "is no feature store (it has no store.json)")
    assert_refused(ilse("store", "ls", extracted), "there is no feature store in")
    (extracted / "notes.txt").unlink()
    assert extracted.exists()


def test_store_rm_leaves_no_folder(ilse: Ilse, extracted: Path) -> None:
    assert ilse("store", "rm", extracted, "--yes").code == 0
    assert not extracted.exists() and extracted.parent.exists()


# --------------------------------------------------------------------------------------------------------------- encode


def test_encode_into_a_folder(
    ilse: Ilse, model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In two shares, named once by options and once by the environment."""
    command = ("encode", model, texts, "--output", tmp_path / "out", "--id-column", "id", "--chunk-texts", 7)
    first = ilse(*command, "--shard", 1, "--num-shards", 2, "--json", tmp_path / "r.json")
    assert first.code == 0 and "19 texts in 3 parts, 19 embedded now" in first.out
    assert json.loads((tmp_path / "r.json").read_text())["texts"] == 19
    with monkeypatch.context() as patch:
        patch.setenv("RANK", "0")
        patch.setenv("WORLD_SIZE", "2")
        assert "21 texts in 3 parts, 21 embedded now" in ilse(*command).out
    assert "40 texts in 6 parts, 0 embedded now" in ilse(*command).out
    found = [
        row for part in sorted((tmp_path / "out").glob("*.parquet")) for row in parquet.read_table(part).to_pylist()
    ]
    assert [(row["id"], row["text"]) for row in found] == [(f"d{i}", text) for i, text in enumerate(TEXTS)]
    np.testing.assert_allclose([row["embedding"] for row in found], load(model).encode(TEXTS), atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--output", "out", "--shard", "2"), "shard is 2 and num_shards None; give both or none"),
        (("--output", "out", "--shard", "2", "--num-shards", "2"), "shard is 2 of 2; allowed are"),
        (("--output", "a.npy", "--shard", "0", "--num-shards", "2"), "several processes need a folder"),
        (("--output", "a.npy", "--engine", "ray"), "several processes need a folder"),
        (("--output", "a.npy", "--id-column", "id"), "other columns need a folder"),
        (("--output", "out", "--engine", "ray", "--shard", "0", "--num-shards", "2"), "divides the work itself"),
        (("--output", "out", "--engine", "spark"), "engine is 'spark'"),
        (("--output", "out", "--id-column", "key"), "has no column 'key'; it has 'id', 'text'"),
        (("--output", "out", "--prompt-name", "qeury"), "prompt_name is 'qeury'; this model has"),
    ],
)
def test_encode_into_a_folder_refuses(ilse: Ilse, model: Path, texts: Path, options: Any, message: str) -> None:
    assert_refused(ilse("encode", model, texts, *options), message)
    assert not list(texts.parent.glob("out/*.parquet")) and not list(texts.parent.glob("*.npy"))


# ---------------------------------------------------------------------------------------------------------------- train


def test_train_with_a_prompt_on_compressed_layers(
    ilse: Ilse, tiny_backbone: Callable[..., Path], mirror: Path, tmp_path: Path
) -> None:
    """The model knows its prompt, and reads raw layers."""
    usual = ("train", "--task", "Banking77Classification", "--data-dir", mirror, "--backbone", tiny_backbone())
    options = ("--epochs", 2, "--hidden", 8, "--prompt", "intent: ", "--compress", 6, "--dtype", "float16")
    done = ilse(*usual, *options, "--output", tmp_path / "model", "--json", tmp_path / "r.json")
    assert done.code == 0, done.error
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["prompt"], report["compressed"]) == ("intent: ", 6)
    model = load(tmp_path / "model")
    assert model.prompts["default"] == "intent: " and model.default_prompt_name == "default"
    assert model[2].layer_width == 32
    test = load_task("Banking77Classification", mirror).splits["test"]
    right = sum(one == label for one, label in zip(model.predict(test.texts), test.labels, strict=True))
    assert 100 * right / len(test.texts) == pytest.approx(report["test"], abs=100 / len(test.texts))
    paper = ilse(*usual, "--recipe", "paper", "--compress", 6, "--output", tmp_path / "other")
    assert_refused(paper, "the recipe wants raw ones; extract without compress")
