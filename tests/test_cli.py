"""The command `ilse` on a tiny backbone and a small mirror, offline: what it writes, and one message if it cannot."""

import dataclasses
import importlib.metadata
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pyarrow as pa
import pytest
import typer
from conftest import Ilse, assert_refused
from pyarrow import parquet
from sentence_transformers import SentenceTransformerTrainer
from typer.testing import CliRunner

from ilse_embed import LayerTransformer, cli, load, scoring
from ilse_embed import model as model_room
from ilse_embed.cli import screen
from ilse_embed.encoders import ENCODERS
from ilse_embed.evaluation import model_meta
from ilse_embed.extraction import extract
from ilse_embed.recipes import RECIPES, Recipe
from ilse_embed.scoring import trained_score
from ilse_embed.tasks import load_task
from ilse_embed.training import train

TEXTS = [
    "A ferry, at “seven”.",
    "",
    "line's end",
    "[bold]markup[/] 漢字",
    "A ferry, at “seven”.",
    "cut \ud83d off",
    "x" * 300,
]
COMMANDS = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]


pytestmark = pytest.mark.usefixtures("short_collections")


# ---------------------------------------------------------------------------------------------- train, evaluate, encode


def test_train_evaluate_encode(ilse: Ilse, tiny_backbone: Callable[..., Path], mirror: Path, tmp_path: Path) -> None:
    """The three commands after each other, for both kinds of task; all figures agree."""
    usual = ("--backbone", tiny_backbone(), "--data-dir", mirror, "--hidden", 16, "--batch-size", 8)
    for task, protocol in (("STSBenchmark", "probe"), ("Banking77Classification", "head")):
        output, report = tmp_path / "models" / task, tmp_path / "reports" / f"{task}.json"
        done = ilse("train", "--task", task, "--output", output, "--json", report, *usual, "--epochs", 3, "--seed", 5)
        assert done.code == 0, done.error
        measured = json.loads(report.read_text(encoding="utf-8"))
        recipe = RECIPES["default"].replace(hidden=16, batch_size=8, epochs=3)
        data = load_task(task, mirror)
        table = extract(LayerTransformer(str(tiny_backbone())), data.texts())
        alone = train(data, table, "cayley", recipe, seed=5)
        score = trained_score(alone, data, table, "test")
        assert measured["test"] == pytest.approx(score, abs=0.05)
        assert measured["validation"] == pytest.approx(alone.validation, abs=0.05)
        assert measured["recipe"] == dataclasses.asdict(recipe) and measured["epochs"] == alone.epochs
        assert recipe.name == "default,batch_size=8,epochs=3,hidden=16"
        assert measured["parameters"] == alone.parameters and measured["model"] == str(output)
        assert measured["seed"] == 5 and measured["task"] == task and len(measured["dataset_revision"]) == 40
        assert measured["run"]["command"].startswith(f"ilse train --task {task}") and measured["seconds"] > 0
        assert f"validation {measured['validation']:.2f}, test {measured['test']:.2f}" in done.out
        saved = load(output)
        assert saved.provenance == {key: measured[key] for key in saved.provenance} | {
            "validation": round(measured["validation"], 4)
        }
        assert saved.provenance["recipe"]["name"] == recipe.name
        assert list((tmp_path / "cache/features").glob("*/*.safetensors"))  # the store is in the cache
        assert not list(output.parent.rglob(".*"))  # no checkpoints, no temporary folder

        results = tmp_path / "results"
        arguments = ("--data-dir", mirror, "--protocol", protocol, "--output", results, "--json", report)
        done = ilse("evaluate", output, "--tasks", task, *arguments)
        assert done.code == 0, done.error
        name = task if protocol == "probe" else f"{task}-head"
        scores = json.loads(report.read_text())
        assert scores["scores"] == {name: pytest.approx(score, abs=0.2)} and scores["protocol"] == protocol
        meta = model_meta(saved)
        assert (scores["model"], scores["revision"]) == (meta.name, meta.revision)
        assert f"{meta.name} @ {meta.revision}" in done.out and f"{scores['scores'][name]:.2f}" in done.out
        assert (results / "results" / meta.name.replace("/", "__") / meta.revision / f"{name}.json").is_file()

    (tmp_path / "texts.txt").write_text("One text.\nAnother.\n")
    assert ilse("encode", output, "texts.txt").code == 0
    rows = parquet.read_table(tmp_path / "texts.embeddings.parquet").to_pylist()
    np.testing.assert_array_equal([row["embedding"] for row in rows], saved.encode(["One text.", "Another."]))


def changed(option: dataclasses.Field[Any]) -> Any:
    """Another allowed value than that of the recipe `default`."""
    kind, usual = get_type_hints(Recipe)[option.name], option.default
    if get_origin(kind) is Literal:
        return next(value for value in get_args(kind) if value not in (usual, "sink_aware"))
    whole = 12 if option.name == "hidden" else 2 + (usual == 2)
    return {bool: not usual, int: whole, int | None: whole, float: 0.015}[kind]


GRAPH_OPTIONS = ("steps", "operator", "gin_depth", "residual", "multiplicity", "graph_seed")


@pytest.mark.parametrize(("encoder", "not_its"), [("cayley", {"pre", "post"}), ("set", {*GRAPH_OPTIONS})])
def test_every_field_of_a_recipe_has_an_option(
    encoder: str, not_its: set[str], ilse: Ilse, tiny_backbone: Callable[..., Path], mirror: Path, tmp_path: Path
) -> None:
    """An encoder takes those that it heeds and refuses the others."""
    options = [option for option in dataclasses.fields(Recipe) if option.name not in {"name"} | not_its]
    known = {name for parameter in COMMANDS["train"].params for name in (*parameter.opts, *parameter.secondary_opts)}
    arguments, help_text = [], " ".join(ilse("train", "--help").out.split())
    for option in options:
        flag = "--" + option.name.replace("_", "-")
        assert flag in known and flag in help_text
        value = changed(option)
        if isinstance(value, bool):
            assert "--no-" + flag[2:] in known
            arguments.append(flag if value else "--no-" + flag[2:])
        else:
            arguments += [flag, value]
    assert all(re.search(rf"\b{encoder}\b", help_text) for encoder in ENCODERS)
    usual = ("train", "--task", "STSBenchmark", "--data-dir", mirror, "--backbone", tiny_backbone())
    usual = (*usual, "--encoder", encoder, "--output", "m")
    for option in not_its:
        given = ["--" + option.replace("_", "-"), "gcn" if option == "operator" else 2]
        refused = ilse(*usual, *(["--residual"] if option == "residual" else given))
        assert_refused(refused, f"encoder '{encoder}' has no option '{option}'; it takes ['")
    done = ilse(*usual, *arguments)
    assert done.code == 0, done.error
    recipe = json.loads((tmp_path / "m/ilse.json").read_text())["recipe"]
    wanted = {option.name: changed(option) for option in options}
    assert {key: recipe[key] for key in wanted} == wanted
    assert recipe["name"] == "default" + "".join(f",{key}={value}" for key, value in sorted(wanted.items()))
    saved = load(tmp_path / "m")
    assert saved[0].pooling == wanted["pooling"]
    if encoder == "cayley":
        assert saved[1].operator == wanted["operator"]
        assert (saved[1].residual, saved[1].multiplicity, saved[1].steps) == (False, 2, wanted["steps"])


def test_a_flag_goes_both_ways(ilse: Ilse, tiny_backbone: Callable[..., Path], mirror: Path, tmp_path: Path) -> None:
    usual = ("train", "--task", "Banking77Classification", "--data-dir", mirror, "--backbone", tiny_backbone())
    usual = (*usual, "--recipe", "paper", "--epochs", 1, "--hidden", 8)
    for flag, value, name in (
        ((), False, "paper,epochs=1,hidden=8"),
        (("--residual",), True, "paper,epochs=1,hidden=8,residual=True"),
        (("--no-residual",), False, "paper,epochs=1,hidden=8"),
        (("--encoder", "cayley,residual=false", "--residual"), True, "paper,epochs=1,hidden=8,residual=True"),
    ):  # an option stands above the spelling
        output = tmp_path / ("-".join(flag) or "none")
        assert ilse(*usual, "--output", output, *flag).code == 0
        recipe = json.loads((output / "ilse.json").read_text())["recipe"]
        assert (recipe["residual"], recipe["name"]) == (value, name)
        assert recipe["sts_loss"] == "mse_score_range" and recipe["scaling"] is False


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train_and_die(arguments: list[str], at: str) -> None:
    """In a process of its own: `ilse train`, killed after three epochs, or before it scores or saves."""
    if at == "scoring":
        scoring.trained_score = die  # type: ignore[assignment]
    elif at == "saving":
        model_room.build = die  # type: ignore[assignment]
    enter = screen.Progress.__enter__

    def entered(self: Any) -> Callable[..., None]:
        update = enter(self)

        def count(done: int, total: int, note: Any = "") -> None:
            update(done, total, note)
            if at == "training" == self.what.lower() and done == 3:
                die()

        return count

    screen.Progress.__enter__ = entered  # type: ignore[method-assign]
    sys.argv = ["ilse", *arguments]
    cli.main()


@pytest.mark.parametrize("at", ["training", "scoring", "saving"])
def test_run_again_after_a_kill(
    ilse: Ilse,
    tiny_backbone: Callable[..., Path],
    mirror: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    at: str,
) -> None:
    """The model of the undisturbed run; what was trained already is not trained again."""
    usual = ["train", "--task", "STSBenchmark", "--data-dir", str(mirror), "--backbone", str(tiny_backbone())]
    usual += ["--hidden", "8", "--epochs", "5", "--output"]
    child = multiprocessing.get_context("fork").Process(target=train_and_die, args=([*usual, "killed"], at))
    child.start()
    child.join(120)
    assert child.exitcode == -signal.SIGKILL
    assert [path.name for path in (tmp_path / "killed").iterdir()] == [".ilse-checkpoints"]
    assert_refused(ilse(*usual, "killed", "--seed", 1), "checkpoints of a run with other settings (seed)")
    with monkeypatch.context() as patch:
        if at != "training":
            patch.setattr(SentenceTransformerTrainer, "train", lambda *a, **k: pytest.fail("trained again"))
        assert ilse(*usual, "killed").code == 0
    assert ilse(*usual, "undisturbed").code == 0
    assert not list(tmp_path.rglob(".*"))
    tensors = [path.relative_to(tmp_path / "killed") for path in (tmp_path / "killed").rglob("*.safetensors")]
    assert len(tensors) == 2
    for file in tensors:
        assert (tmp_path / "killed" / file).read_bytes() == (tmp_path / "undisturbed" / file).read_bytes()


@pytest.mark.parametrize("output", [".", "..", "../there", "new/", "./de/ep"])
def test_train_into_any_folder(
    ilse: Ilse,
    tiny_backbone: Callable[..., Path],
    mirror: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    output: str,
) -> None:
    """Relative to where one stands; one that is there and empty, or nearly, will do."""
    (tmp_path / "over/there").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "over/there")
    usual = ("--task", "STSBenchmark", "--data-dir", mirror, "--backbone", tiny_backbone(), "--epochs", 1)
    done = ilse("train", *usual, "--encoder", "set", "--hidden", 8, "--output", output)
    assert done.code == 0, done.error
    assert load(Path(output).resolve()).get_embedding_dimension() == 8
    assert {path.name for path in tmp_path.iterdir()} == {"cache", "over"} and not list(tmp_path.rglob(".*"))


@pytest.mark.parametrize(("encoder", "layer"), [("layer", 2), ("mlp", -2), ("mlp", "mean")])
def test_train_on_the_quickstart_needs_no_mirror(
    ilse: Ilse, tiny_backbone: Callable[..., Path], tmp_path: Path, encoder: str, layer: int | str
) -> None:
    arguments = ("--encoder", f"{encoder},layer={layer}", "--epochs", 1, "--store", tmp_path / "s")
    done = ilse("train", "--task", "quickstart-intents", "--backbone", tiny_backbone(), "--output", "m", *arguments)
    assert done.code == 0, done.error
    trained = load(tmp_path / "m")
    assert trained.provenance["encoder_args"] == {"layer": layer} and len(trained.labels) == 20
    assert list((tmp_path / "s").glob("*/*.safetensors")) and not (tmp_path / "cache").exists()


def test_train_lora_and_shots(ilse: Ilse, tiny_backbone: Callable[..., Path], mirror: Path, tmp_path: Path) -> None:
    backbone = tiny_backbone()
    usual = ("--task", "Banking77Classification", "--data-dir", mirror, "--backbone", backbone, "--json", "r.json")
    adapter = ("--encoder", "lora,rank=2,targets=q_proj+down_proj,max_rows=40", "--epochs", 1)
    done = ilse("train", "--output", "lora", *usual, *adapter, "--prompt", "q: ", "--learning-rate", 1e-3)
    assert done.code == 0, done.error
    count = 3 * 2 * (32 + 32 + 48 + 32) + 32 * 4 + 4
    assert f"{count:,} trained parameters, 1 epochs, " in done.out
    measured = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert measured["encoder"] == "lora" and measured["parameters"] == count and measured["test"] > 0
    told = {"rank": 2, "targets": ["down_proj", "q_proj"], "max_rows": 40, "learning_rate": 1e-3, "batch_size": 16}
    assert measured["lora"] == measured["lora"] | told and measured["rows"]["train"] == 40
    scored = ilse("evaluate", "lora", "--tasks", "Banking77Classification", "--data-dir", mirror, "--protocol", "head")
    assert scored.code == 0, scored.error
    assert f"{measured['test']:.2f}" in scored.out and "ilse/lora-" in scored.out
    assert not list((tmp_path / "cache").glob("features")) and not list(tmp_path.rglob(".ilse*"))

    for output, more, rows in (("few", (), (8, 8)), ("whole", ("--whole-validation",), (8, 16))):
        shots = ("--encoder", "set", "--hidden", 8, "--shots", 2, "--epochs", 1, *more)
        done = ilse("train", "--output", output, *usual, *shots)
        assert done.code == 0, done.error
        assert f"2 of each class: {rows[0]} texts to train on, {rows[1]} to choose by" in done.out
        measured = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
        assert measured["shots"] == load(tmp_path / output).provenance["shots"] == 2
        assert tuple(measured["rows"].values()) == rows


# --------------------------------------------------------------------------------------------------------------- encode


def write(folder: Path, suffix: str, column: str = "text", texts: list[str] = TEXTS) -> Path:
    path = folder / f"texts{suffix}"
    plain = [text.replace("\ud83d", "\ufffd") for text in texts]
    if suffix == ".txt":
        path.write_text("\n".join(plain) + "\n", encoding="utf-8")
    elif suffix == ".jsonl":  # with half a surrogate pair, as JSON allows it
        path.write_text("".join(json.dumps({"id": i, column: text}) + "\n" for i, text in enumerate(texts)))
    elif suffix == ".csv":
        cells = [text.replace('"', '""') for text in plain]
        path.write_text(
            f'id,"{column}"\n' + "".join(f'{i},"{cell}"\n' for i, cell in enumerate(cells)), encoding="utf-8"
        )
    elif suffix == ".tsv":
        path.write_text(f"id\t{column}\n" + "".join(f"{i}\t{cell}\n" for i, cell in enumerate(plain)), encoding="utf-8")
    else:
        parquet.write_table(pa.table({"id": list(range(len(plain))), column: plain}), path)
    return path


@pytest.mark.parametrize("column", ["text", "Größe der Sätze"])
@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".csv", ".tsv", ".parquet"])
def test_encode_reads(ilse: Ilse, model: Path, tmp_path: Path, suffix: str, column: str) -> None:
    file = write(tmp_path, suffix, column)
    more = () if suffix == ".txt" or column == "text" else ("--column", column)
    done = ilse("encode", model, file, *more)
    assert done.code == 0, done.error
    assert f"{len(TEXTS)} texts -> {tmp_path}/texts.embeddings.parquet (width 12)" in done.out
    table = parquet.read_table(tmp_path / "texts.embeddings.parquet")
    assert table.column_names == ["text", "embedding"] and table.schema.field("embedding").type == pa.list_(
        pa.float32(), 12
    )
    assert table["text"].to_pylist() == [text.replace("\ud83d", "\ufffd") for text in TEXTS]
    np.testing.assert_allclose(table["embedding"].to_pylist(), load(model).encode(TEXTS), atol=1e-6)


@pytest.mark.parametrize("output", ["vectors.npy", "deep/er/vectors.parquet", "with space.npy"])
def test_encode_writes(ilse: Ilse, model: Path, tmp_path: Path, output: str) -> None:
    file = write(tmp_path, ".jsonl")
    before = file.read_bytes()
    assert ilse("encode", model, file, "--output", tmp_path / output, "--batch-tokens", 40).code == 0
    if output.endswith(".npy"):
        found = np.load(tmp_path / output, allow_pickle=False)
    else:
        found = np.array(parquet.read_table(tmp_path / output)["embedding"].to_pylist(), dtype=np.float32)
    assert found.dtype == np.float32 and found.shape == (len(TEXTS), 12)
    np.testing.assert_allclose(found, load(model).encode(TEXTS), atol=1e-6)
    assert file.read_bytes() == before
    written = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert written == {file, tmp_path / output}


def test_encode_with_a_moved_backbone(
    ilse: Ilse, tiny_backbone: Callable[..., Path], model: Path, tmp_path: Path
) -> None:
    file = write(tmp_path, ".txt")
    assert ilse("encode", model, file, "--backbone", tiny_backbone()).code == 0
    wrong = ilse("encode", model, file, "--backbone", tiny_backbone(num_hidden_layers=2))
    assert_refused(wrong, "layers 3 where the artifact needs 4")


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("{model}", "texts.txt", "--output", "vectors.csv"),
            "vectors.csv; allowed are a folder, or a name that ends in",
        ),
        (("{model}", "texts.parquet", "--output", "texts.parquet"), "a file of the texts itself; take another name"),
        (("{model}", "texts.docx"), "allowed are .txt, .jsonl, .csv, .tsv, .parquet and folders of them"),
        (("{model}", "absent.csv"), "there is no file absent.csv"),
        (("{model}", "absent.parquet", "--output", "texts.parquet"), "there is no file absent.parquet"),
        (("{model}", "folder.csv"), "folder.csv"),
        (("{model}", "texts.csv", "--column", "titel"), "titel"),
        (("{model}", "two.csv"), "text"),
        (("{model}", "empty.csv"), "empty.csv"),
        (("{model}", "latin1.csv"), "latin1.csv"),
        (("{model}", "damaged.parquet"), "damaged.parquet"),
        (("/no/such/model", "texts.txt"), "there is no folder /no/such/model"),
        (("nowhere", "texts.txt"), "there is no folder nowhere, and no saved model nowhere on the hub or in its cache"),
        (("folder", "texts.txt"), "folder holds no saved model (no modules.json)"),
        (("damaged-model", "texts.txt"), "incomplete metadata"),
        (("{model}", "texts.txt", "--backbone", "/no/such/backbone"), "/no/such/backbone"),
        (("{model}", "texts.txt", "--backbone", "[red]./no"), "[red]./no"),
    ],
)
def test_encode_refuses(ilse: Ilse, model: Path, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    for suffix in (".txt", ".csv", ".parquet"):
        write(tmp_path, suffix)
    (tmp_path / "two.csv").write_text("title,body\na,b\n")
    (tmp_path / "empty.csv").touch()
    (tmp_path / "latin1.csv").write_bytes("text\ngrün\n".encode("latin-1"))
    (tmp_path / "damaged.parquet").write_bytes(b"PAR1 nothing PAR1")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder.csv").mkdir()
    for file in model.rglob("*"):
        if file.is_file():
            copy = tmp_path / "damaged-model" / file.relative_to(model)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(file.read_bytes()[: -9 if file.suffix == ".safetensors" else None])
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert_refused(ilse("encode", *(part.format(model=model) for part in arguments)), message)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"--output": "finished"}, "finished holds a finished model already; take another --output or remove it"),
        ({"--output": "finished/../finished"}, "holds a finished model already"),
        ({"--output": "file"}, "file is a file; it must be a folder, new or there already"),
        ({"--output": "file/deep/m"}, "--output is file/deep/m, but file is a file; it must be a folder"),
        ({"--output": "/"}, "--output is /, the root of the file system; it must be a folder below"),
        ({"--output": "repository"}, "repository holds README.md, which saving would overwrite"),
        ({"--output": "repository/docs/.."}, "docs/.. holds README.md, which saving would overwrite"),
        ({"--recipe": "fast"}, 'recipe is \'fast\'; allowed are ["default", "paper"] and files that end'),
        ({"--encoder": "caley"}, 'encoder is \'caley\'; allowed are ["cayley", "concat", "dwatt", '),
        ({"--encoder": "cayley,layer=1"}, "encoder 'cayley' has no option 'layer'"),
        ({"--encoder": "cayley,steps"}, "'steps' must be OPTION=VALUE, each option once"),
        ({"--encoder": "layer,layer=4"}, "layer is 4; this backbone has layers 0 to 3"),
        ({"--encoder": "cayley,rank=4"}, "encoder 'cayley' has no option 'rank'"),
        (
            {"--encoder": "lora", "--compress": 8},
            "--compress would do nothing with --encoder lora, which uses no",
        ),
        ({"--encoder": "lora", "--dtype": "float16"}, "--dtype would do nothing with --encoder lora"),
        ({"--encoder": "lora", "--hidden": 8}, "encoder 'lora' has no option 'hidden'"),
        ({"--encoder": "lora,rank=0"}, "rank is 0; allowed are whole numbers from 1"),
        ({"--encoder": "lora,targets=query"}, "LlamaModel has no linear map ['query']"),
        ({"--shots": 2}, "of each class, at least 1, of a classification task with a training split; got 2 for 'STSB"),
        ({"--task": "STS12"}, "STS12 has no train split"),
        ({"--task": "SICK-R"}, "there is no "),
        ({"--task": "NFCorpus"}, "allowed are STS, Classification"),
        ({"--task": "STSBenchmrak"}, "mteb has no English task 'STSBenchmrak'"),
        ({"--epochs": 0}, "epochs is 0; allowed are whole numbers from 1"),
        ({"--dropout": "nan"}, "dropout is nan; allowed are numbers from 0 to below 1"),
        ({"--backbone": "/no/such/backbone"}, "/no/such/backbone"),
        ({"--backbone": "folder"}, "folder"),
    ],
    ids=str,
)
def test_train_refuses(
    ilse: Ilse,
    tiny_backbone: Callable[..., Path],
    model: Path,
    mirror: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: dict[str, Any],
    message: str,
) -> None:
    """Before the backbone has run on a single text (is loaded, if the output is wrong), and nothing is written."""
    too_late = "ilse_embed.backbone.LayerTransformer" if "--output" in arguments else "ilse_embed.extraction.extract"
    monkeypatch.setattr(too_late, lambda *a, **k: pytest.fail("too late"))
    (tmp_path / "finished").mkdir()
    (tmp_path / "finished/modules.json").write_text("[]")
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "repository/docs").mkdir(parents=True)
    (tmp_path / "repository/README.md").write_text("mine")
    (mirror / "STS12").mkdir(exist_ok=True)
    (mirror / "STS12/test.parquet").write_bytes((mirror / "STSBenchmark/test.parquet").read_bytes())
    usual = {"--task": "STSBenchmark", "--backbone": tiny_backbone(), "--data-dir": mirror, "--output": "m"}
    before = sorted(tmp_path.rglob("*"))
    result = ilse("train", *(part for pair in (usual | arguments).items() for part in pair))
    assert_refused(result, message)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tasks", " , "), "--tasks is ' , '; give names of mteb tasks"),
        (("--tasks", "STSBenchmrak"), "mteb has no English task 'STSBenchmrak'"),
        (("--tasks", "STSBenchmark", "--protocol", "probes"), "protocol is 'probes'; allowed are"),
        (("--tasks", "STSBenchmark", "--protocol", "head"), "protocol 'head' is for classification"),
        (("--tasks", "Banking77Classification", "--leak-free"), "leak_free is for STS tasks"),
    ],
)
def test_evaluate_refuses(
    ilse: Ilse, model: Path, mirror: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    assert_refused(ilse("evaluate", model, "--data-dir", mirror, *arguments), message)
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "--task", "STSBenchmark"),
        ("train", "--task", "STSBenchmark", "--output", "m", "--pooling", "max"),
        ("train", "--task", "STSBenchmark", "--output", "m", "--data-dir", "/no/such"),
        ("train", "--task", "STSBenchmark", "--output", "m", "--name", "mine"),
        ("encode", "model", "texts.txt", "--batch-tokens", "0"),
        ("unknown",),
    ],
)
def test_usage_errors(ilse: Ilse, arguments: tuple[str, ...]) -> None:
    result = ilse(*arguments)
    assert result.code == 2 and "Traceback" not in result.error and result.error


def test_a_traceback_on_request(ilse: Ilse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ILSE_DEBUG", "1")
    with pytest.raises(FileNotFoundError, match="there is no file absent"):
        ilse("encode", "m", "absent.txt")


def test_a_key_error_is_a_plain_message(ilse: Ilse, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(*_: Any) -> list[Path]:
        raise KeyError("no layer features of 'a'\nextract it first")

    monkeypatch.setattr("ilse_embed.bulk.find_files", find)
    result = ilse("encode", "m", "texts.txt")
    assert result.code == 1 and result.error == "error: no layer features of 'a'\nextract it first\n"


def test_an_error_of_ours_is_not_hidden(ilse: Ilse, monkeypatch: pytest.MonkeyPatch) -> None:
    """What no user can mend keeps its traceback."""
    monkeypatch.setattr("ilse_embed.bulk.find_files", lambda *a: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ilse("encode", "m", "texts.txt")


# ------------------------------------------------------------------------------------------------------------ lightness


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["encode", "--help"]], ids=str)
def test_help_is_light(arguments: list[str]) -> None:
    heavy = [
        "torch",
        "transformers",
        "sentence_transformers",
        "mteb",
        "datasets",
        "sklearn",
        "pandas",
    ]
    code = f"""
import sys
from ilse_embed.cli import main
sys.argv = ["ilse", *{arguments}]
try:
    main()
except SystemExit as exit_:
    assert not exit_.code
assert not [name for name in {heavy} if name in sys.modules], list(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Usage: ilse" in done.stdout


def test_the_entry_point() -> None:
    (entry,) = (one for one in importlib.metadata.entry_points(group="console_scripts") if one.name == "ilse")
    assert entry.load() is cli.main
    assert CliRunner().invoke(cli.app, ["--help"]).exit_code == 0
    assert set(COMMANDS) == {"demo", "extract", "train", "search", "evaluate", "encode", "store", "grid"}
