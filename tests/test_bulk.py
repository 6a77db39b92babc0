"""Files of any size -> embeddings: every text once, whatever happens in between."""

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet
from sentence_transformers import SentenceTransformer

from ilse_embed import LayerTransformer, build, build_encoder, bulk, load
from ilse_embed.bulk import BulkJob, embed_files, find_files, share_of
from ilse_embed.embedding import TextEmbedder
from ilse_embed.tables import TextFile

TEXTS = [f"Text number {number % 70}{' and so on' * (number % 70 % 5)}." for number in range(103)]
HOSTILE = ["", " ", "cut off \ud83d", 'a "quoted" word', "a,b\tc", "two\nlines", "\u2028", "x" * 600, "NaN"]


@pytest.fixture(scope="module")
def saved(tiny_backbone: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    backbone = LayerTransformer(str(tiny_backbone()), max_seq_length=96, on_truncate="ignore")
    folder = tmp_path_factory.mktemp("bulk") / "model"
    model = build(backbone, build_encoder("cayley", backbone.num_layers, 32, hidden=12))
    model.prompts = {"query": "query: ", "document": ""}
    model.save(str(folder))
    return folder


@pytest.fixture(scope="module")
def model(saved: Path) -> SentenceTransformer:
    return load(saved)


def jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"id": f"doc-{i}", "text": text}) + "\n" for i, text in enumerate(texts)))
    return path


def job(output: Path, *files: Path, **options: Any) -> BulkJob:
    return BulkJob(tuple(TextFile(file) for file in files), output, **{"chunk_texts": 10} | options)


def rows(output: Path) -> list[dict[str, Any]]:
    parts = sorted(output.glob("part-*.parquet"))
    return [row for part in parts for row in parquet.read_table(part).to_pylist()]


# ------------------------------------------------------------------------------------------------------------ embedding


@pytest.mark.parametrize("batch_tokens", [1, 100, 5000])
def test_the_embeddings_of_encode(model: SentenceTransformer, batch_tokens: int) -> None:
    texts = [*HOSTILE, *TEXTS]
    found = TextEmbedder(model, batch_tokens=batch_tokens)(texts)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, model.encode(texts), atol=1e-6)
    assert TextEmbedder(model)([]).shape == (0, 12)


def test_equal_texts_run_once(model: SentenceTransformer) -> None:
    embed, told = TextEmbedder(model, batch_tokens=100), []
    embed(TEXTS * 3, told.append)
    assert told[-1] == len(set(TEXTS)) < len(TEXTS)
    assert embed.runner.tokens == model[0].preprocess(list(set(TEXTS)))["attention_mask"].sum()


@pytest.mark.parametrize(
    ("options", "prompt"),
    [({}, ""), ({"prompt": "find: "}, "find: "), ({"prompt_name": "query"}, "query: "), ({"prompt": ""}, "")],
)
def test_prompts(model: SentenceTransformer, options: dict[str, str], prompt: str) -> None:
    found = TextEmbedder(model, **options)(TEXTS[:5])
    np.testing.assert_allclose(found, model.encode(TEXTS[:5], prompt=prompt), atol=1e-6)
    with pytest.raises(ValueError, match=r"prompt_name is 'qeury'; this model has \[\"document\", \"query\"\]"):
        TextEmbedder(model, prompt_name="qeury")


# --------------------------------------------------------------------------------------------------------------- output


def test_parts(model: SentenceTransformer, tmp_path: Path) -> None:
    texts = [*HOSTILE, *TEXTS]
    file, told = jsonl(tmp_path / "a.jsonl", texts), []
    result = embed_files(
        BulkJob((TextFile(file, "text", "id"),), tmp_path / "out", chunk_texts=10),
        model,
        progress=lambda *done: told.append(done),
    )
    assert (result.texts, result.embedded, result.parts) == (112, 112, 12)
    assert [done for done, _ in told] == [*range(10, 111, 10), 112] and told[-1][1] == result.tokens
    found = rows(tmp_path / "out")
    assert [row["row"] for row in found] == list(range(112)) and {row["file"] for row in found} == {"a.jsonl"}
    assert [row["id"] for row in found] == [f"doc-{number}" for number in range(112)]
    assert [row["text"] for row in found] == [text.replace("\ud83d", "\ufffd") for text in texts]
    np.testing.assert_allclose([row["embedding"] for row in found], model.encode(texts), atol=1e-6)
    assert not list((tmp_path / "out").glob("*.tmp"))


def test_several_files_without_texts(model: SentenceTransformer, tmp_path: Path) -> None:
    files = [jsonl(tmp_path / f"{name}.jsonl", TEXTS[:size]) for name, size in (("b", 15), ("a", 1), ("c", 10))]
    embed_files(job(tmp_path / "out", *files, keep_texts=False), model)
    found = rows(tmp_path / "out")
    assert [(row["file"], row["row"]) for row in found] == [
        *(("b.jsonl", number) for number in range(15)),
        ("a.jsonl", 0),
        *(("c.jsonl", number) for number in range(10)),
    ]
    assert set(found[0]) == {"file", "row", "embedding"}


def test_a_file_that_grew_and_one_without_texts(model: SentenceTransformer, tmp_path: Path) -> None:
    """Neither costs what is done; only a part whose texts changed has to go."""
    files = [jsonl(tmp_path / "a.jsonl", []), jsonl(tmp_path / "b.jsonl", TEXTS[:30])]
    assert embed_files(job(tmp_path / "out", *files), model).embedded == 30
    jsonl(files[1], TEXTS[:37])
    again = embed_files(job(tmp_path / "out", *files), model)
    assert (again.texts, again.embedded) == (37, 7)
    assert [row["text"] for row in rows(tmp_path / "out")] == TEXTS[:37]


def test_truncated_embeddings(saved: Path, tmp_path: Path) -> None:
    short = load(saved, truncate_dim=5)
    np.testing.assert_allclose(TextEmbedder(short)(TEXTS), short.encode(TEXTS), atol=1e-6)


def test_shares_are_the_whole(model: SentenceTransformer, tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", TEXTS)
    results = [
        embed_files(job(tmp_path / "out", file), model, shard=shard, num_shards=3, batch_tokens=60)
        for shard in (2, 0, 1)
    ]
    assert sum(result.texts for result in results) == sum(result.embedded for result in results) == len(TEXTS)
    embed_files(job(tmp_path / "one", file), model, batch_tokens=60)
    assert rows(tmp_path / "out") == rows(tmp_path / "one")
    again = embed_files(job(tmp_path / "out", file), model)  # divided in another way, all is there
    assert (again.texts, again.embedded, again.tokens) == (len(TEXTS), 0, 0)


@pytest.mark.parametrize(
    ("given", "environment", "share"),
    [
        ((None, None), {}, (0, 1)),
        ((2, 5), {"RANK": "1", "WORLD_SIZE": "2"}, (2, 5)),
        ((None, None), {"RANK": "1", "WORLD_SIZE": "2"}, (1, 2)),
        ((None, None), {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "8"}, (3, 8)),
        (
            (None, None),
            {
                "SLURM_ARRAY_TASK_ID": "7",
                "SLURM_ARRAY_TASK_COUNT": "4",
                "SLURM_ARRAY_TASK_MIN": "1",
                "SLURM_ARRAY_TASK_STEP": "2",
            },
            (3, 4),
        ),
        (
            (None, None),
            {"SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_TASK_COUNT": "3", "RANK": "1", "WORLD_SIZE": "4"},
            (9, 12),
        ),
    ],
)
def test_share_of_the_environment(
    given: tuple[int | None, int | None], environment: dict[str, str], share: tuple[int, int]
) -> None:
    assert share_of(*given, environment) == share


@pytest.mark.parametrize(
    ("given", "environment", "words"),
    [
        ((1, None), {}, "give both or none"),
        ((None, 2), {}, "give both or none"),
        ((2, 2), {}, "shard is 2 of 2; allowed are 0 to num_shards - 1"),
        ((-1, 2), {}, "shard is -1 of 2"),
        ((0, 0), {}, "shard is 0 of 0"),
        ((None, None), {"RANK": "1"}, "of RANK and WORLD_SIZE only one is set"),
        ((None, None), {"SLURM_ARRAY_TASK_COUNT": "1"}, "only one is set"),
        ((None, None), {"RANK": "3", "WORLD_SIZE": "3"}, "shard is 3 of 3"),
    ],
)
def test_shares_that_there_are_not(given: tuple[Any, Any], environment: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        share_of(*given, environment)


# -------------------------------------------------------------------------------------------------------------- crashes


def embed_and_die(task: BulkJob, saved: Path, at: str) -> None:
    """In a process of its own: killed in the fifth part, while it is embedded, flushed or renamed."""
    name = {"embedding": "write_parquet", "flushing": "fsync", "renaming": "replace"}[at]
    place: Any = bulk if at == "embedding" else os
    real, calls = getattr(place, name), []

    def fifth(*given: Any, **named: Any) -> Any:
        calls.append(given)
        return os.kill(os.getpid(), signal.SIGKILL) if len(calls) == 5 else real(*given, **named)

    setattr(place, name, fifth)
    embed_files(task, load(saved), batch_tokens=60)


@pytest.mark.parametrize("at", ["embedding", "flushing", "renaming"])
def test_killed_and_run_again(model: SentenceTransformer, saved: Path, tmp_path: Path, at: str) -> None:
    task = job(tmp_path / "out", jsonl(tmp_path / "a.jsonl", TEXTS))
    child = multiprocessing.get_context("fork").Process(target=embed_and_die, args=(task, saved, at))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    there = len(list((tmp_path / "out").glob("part-*.parquet")))
    assert there == (3 if at == "flushing" else 4)  # the note of the folder is flushed too, and linked
    result = embed_files(task, model, batch_tokens=60)
    assert (result.texts, result.embedded) == (len(TEXTS), len(TEXTS) - 10 * there)
    embed_files(job(tmp_path / "undisturbed", tmp_path / "a.jsonl"), model, batch_tokens=60)
    assert rows(tmp_path / "out") == rows(tmp_path / "undisturbed")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("model", "other settings (model)"),
        ("renamed", "other settings (files)"),
        ("chunk_texts", "other settings (chunk_texts)"),
        ("prompt", "other settings (prompt)"),
        ("same size", "part-000001.parquet has other texts than"),
        ("truncated part", "part-000001.parquet is damaged"),
        ("foreign file", "is for embeddings, but it has other files"),
    ],
)
def test_what_does_not_go_together(
    model: SentenceTransformer, tiny_backbone: Callable[..., Path], tmp_path: Path, change: str, words: str
) -> None:
    file, output, options = jsonl(tmp_path / "a.jsonl", TEXTS[:30]), tmp_path / "out", {}
    if change == "foreign file":
        output.mkdir()
        (output / "thesis.tex").write_text("years of work")
    else:
        embed_files(job(output, file), model)
    before = {path: path.read_bytes() for path in output.iterdir()}
    if change == "model":
        backbone = LayerTransformer(str(tiny_backbone(seed=1)))
        model = build(backbone, build_encoder("set", backbone.num_layers, 32, hidden=12))
    elif change == "renamed":
        file = file.rename(tmp_path / "b.jsonl")
    elif change == "chunk_texts":
        options = {"chunk_texts": 11}
    elif change == "prompt":
        options = {"prompt": "x "}
    elif change == "same size":
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join([*lines[:15], lines[15].replace("Text", "Next"), *lines[16:]]))
    elif change == "truncated part":
        part = output / "part-000001.parquet"
        part.write_bytes(part.read_bytes()[:-7])
        before[part] = part.read_bytes()
    with pytest.raises((ValueError, OSError)) as error:
        embed_files(job(output, file, **options), model)
    assert words in str(error.value)
    assert {path: path.read_bytes() for path in output.iterdir()} == before


def test_a_fault_in_the_last_row_keeps_what_is_done(model: SentenceTransformer, tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", TEXTS[:25])
    file.write_text(file.read_text() + '{"text": 5}\n')
    with pytest.raises(ValueError, match=r"column 'text' takes texts; row 26 \(without the header\) has 5"):
        embed_files(job(tmp_path / "out", file), model)
    assert len(rows(tmp_path / "out")) == 20


def test_an_embedding_that_is_not_finite(tiny_backbone: Callable[..., Path], tmp_path: Path) -> None:
    backbone = LayerTransformer(str(tiny_backbone()))
    model = build(backbone, build_encoder("mean", backbone.num_layers, 32))
    token = backbone.tokenizer("Ω", add_special_tokens=False)["input_ids"][-1]
    backbone.model.get_input_embeddings().weight.data[token] = float("nan")
    file = jsonl(tmp_path / "a.jsonl", [*TEXTS[:15], "a poisoned Ω"])
    with pytest.raises(FloatingPointError, match="the embedding of the text 'a poisoned Ω' is not finite"):
        embed_files(job(tmp_path / "out", file), model)
    assert len(rows(tmp_path / "out")) == 10


# ---------------------------------------------------------------------------------------------------------------- files


def test_files(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    for name in ("b.txt", "a.jsonl", "c.md"):
        (tmp_path / "d" / name).write_text("x\n")
    (tmp_path / "z.csv").write_text("text\nx\n")
    assert find_files([tmp_path / "z.csv", tmp_path / "d"]) == [
        tmp_path / "z.csv",
        tmp_path / "d/a.jsonl",
        tmp_path / "d/b.txt",
    ]
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"empty has no file that ends in \.txt"):
        find_files([tmp_path / "empty"])
    with pytest.raises(FileNotFoundError, match=r"there is no file .*absent\.txt"):
        find_files([tmp_path / "absent.txt"])
    with pytest.raises(ValueError, match=r"c\.md ends in '\.md'; allowed are"):
        find_files([tmp_path / "d/c.md"])
    (tmp_path / "b.txt").write_text("x\n")
    with pytest.raises(ValueError, match=r"several files have the name b\.txt"):
        find_files([tmp_path / "d", tmp_path / "b.txt"])
