"""A grid as data: every combination once, what is missing and nothing twice, killed anywhere."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mteb
import numpy as np
import pyarrow as pa
import pytest
from conftest import assert_refused
from pyarrow import parquet

from ilse_embed.comparison import compare
from ilse_embed.experiments import Laboratory, model_name
from ilse_embed.grid import Results, Run, read_grid, tasks_of
from ilse_embed.recipes import Recipe
from ilse_embed.scoring import outcome_score

KINDS = {
    "STSBenchmark": ("sts", True),
    "STS12": ("sts", False),
    "BIOSSES": ("sts", False),
    "Banking77Classification": ("classification", True),
}
BLOCK: dict[str, Any] = {
    "backbones": ["tiny"],
    "methods": ["set"],
    "recipes": ["default"],
    "tasks": ["STSBenchmark"],
    "seeds": [0],
}


def grid_file(folder: Path, *blocks: dict[str, Any]) -> Path:
    path = folder / "grid.toml"
    tables = ("\n".join(f"{key} = {json.dumps(value)}" for key, value in block.items()) for block in blocks)
    path.write_text("".join(f"[[block]]\n{table}\n" for table in tables))
    return path


def test_every_combination_once(tmp_path: Path) -> None:
    """Tasks without a training split share the run of STSBenchmark; what two blocks name is one run."""
    path = grid_file(
        tmp_path,
        BLOCK | {"methods": ["set", "cayley,steps=2"], "recipes": ["default", "paper"], "seeds": [0, 1]},
        BLOCK | {"methods": [" cayley , steps=2"], "tasks": ["STS12", "BIOSSES", "Banking77Classification"]},
    )
    assert tasks_of(path) == list(KINDS)
    runs = read_grid(path, KINDS)
    assert len(runs) == 8 + 1 and len({run.id for run in runs}) == 9
    found = {(run.method, run.recipe.name, run.trained_on, run.seed): run.tasks for run in runs}
    assert found["cayley,steps=2", "default", "STSBenchmark", 0] == ("STSBenchmark", "STS12", "BIOSSES")
    assert found["cayley,steps=2", "default", "STSBenchmark", 1] == ("STSBenchmark",)
    assert found["cayley,steps=2", "default", "Banking77Classification", 0] == ("Banking77Classification",)


def test_names_of_results() -> None:
    sts = Run("tiny", "set", Recipe(), "STSBenchmark", "sts", 0, ("STSBenchmark", "STS12"))
    assert sts.result_names == ["STSBenchmark", "STS12", "STS12-leakfree"]
    classes = Run("tiny", "set", Recipe(), "Banking77Classification", "classification", 0, ("Banking77Classification",))
    assert classes.result_names == [f"Banking77Classification{suffix}" for suffix in ("", "-full-probe", "-head")]


@pytest.mark.parametrize(
    "change",
    [
        {"backbone": "other"},
        {"method": "cayley"},
        {"recipe": Recipe(epochs=29)},
        {"trained_on": "Banking77Classification"},
        {"seed": 1},
    ],
)
def test_identity_of_a_run(change: dict[str, Any]) -> None:
    """What decides the result is in it; the tasks to score on are not."""
    facts: dict[str, Any] = {"backbone": "tiny", "method": "set", "recipe": Recipe(), "trained_on": "STSBenchmark"}
    facts |= {"kind": "sts", "seed": 0, "tasks": ("STSBenchmark",)}
    assert Run(**facts).id == Run(**facts | {"tasks": ("STS12",)}).id
    assert Run(**facts).id != Run(**facts | change).id


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("block = 1", r"must have \[\[block\]\] tables and nothing else"),
        ("[[block]\n", "is no TOML"),
        ("x = 1\n[[block]]\n", r"nothing else; it has \['x'\]"),
        ({"seeds": []}, "block 1: seeds must be a list of at least one value"),
        ({"methods": "set"}, "block 1: methods must be a list"),
        ({"seeds": [-1]}, r"seeds are \[-1\]; allowed are whole numbers from 0"),
        ({"shots": [1]}, r"block 1: unknown are \['shots'\]; allowed are"),
        ({"methods": ["caley"]}, "encoder is 'caley'; allowed are"),
        ({"methods": ["cayley,steps=-1"]}, "steps is -1; allowed are whole numbers from 0"),
        ({"methods": ["gnn,topology=ring"]}, "topology is 'ring'; allowed are"),
        ({"methods": ["mlp,layer=middle"]}, "layer is 'middle'"),
        ({"methods": ["lora,rank=0"]}, "rank is 0; allowed are whole numbers from 1"),
        ({"recipes": ["fast"]}, r"recipe is 'fast'; allowed are \[\"default\", \"paper\"\]"),
        ({"tasks": ["STS17"]}, "STS17"),
    ],
)
def test_what_is_no_grid(content: Any, message: str, tmp_path: Path) -> None:
    path = grid_file(tmp_path, BLOCK | content) if isinstance(content, dict) else tmp_path / "grid.toml"
    if isinstance(content, str):
        path.write_text(content)
    with pytest.raises((ValueError, KeyError), match=message):
        read_grid(path, KINDS)


# ---------------------------------------------------------------------------------------------------------------- runs

TASKS = ["STSBenchmark", "STS12", "Banking77Classification"]
QUICK = "set,epochs=2,hidden=8"


@pytest.fixture
def place(mirror: Path, tiny_backbone: Callable[..., Path], tmp_path: Path) -> Callable[..., Laboratory]:
    """A laboratory with a mirror that has STS12 too, half of it pairs that are trained on."""
    data = tmp_path / "data"
    if not data.exists():
        data.mkdir()
        for folder in mirror.iterdir():
            (data / folder.name).symlink_to(folder)
        (data / "STS12").mkdir()
        train, test = (parquet.read_table(mirror / "STSBenchmark" / f"{split}.parquet") for split in ("train", "test"))
        parquet.write_table(pa.concat_tables([train.slice(0, 12), test]), data / "STS12" / "test.parquet")

    def make() -> Laboratory:
        folders = {"work": tmp_path / "work", "store": tmp_path / "stores", "data_dir": data}
        return Laboratory(Results(tmp_path / "out").refresh(), places={"tiny": str(tiny_backbone())}, **folders)

    return make


def runs_of(laboratory: Laboratory, folder: Path, **block: Any) -> list[Run]:
    tasks = [laboratory.task(name) for name in TASKS]
    kinds = {task.name: (task.kind, "train" in task.splits) for task in tasks}
    return read_grid(grid_file(folder, BLOCK | {"tasks": TASKS, "methods": [QUICK]} | block), kinds)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_results_are_mtebs_and_nothing_is_done_twice(place: Callable[..., Laboratory], tmp_path: Path) -> None:
    laboratory = place()
    lora = "lora,rank=2,epochs=1"
    runs = runs_of(laboratory, tmp_path, methods=["layer,layer=best", QUICK, lora])
    assert laboratory.results.seconds_left(runs) is None
    told: list[tuple[Run, str]] = []
    assert laboratory.perform(runs, lambda run, what: told.append((run, what))) == (6, {})
    assert [run for run, what in told if what == "starts"] == runs
    assert laboratory.results.seconds_left(runs) == 0

    for run in runs:
        assert laboratory.results.missing(run) == []
        note = laboratory.results.notes[run.id]
        epochs = {"layer": None, "set": 2, "lora": 1}[run.method.partition(",")[0]]
        assert (note["method"], note["seed"], note["recipe"]["epochs"]) == (run.method, 0, epochs)
        assert note["chosen"] == run.method or note["chosen"].startswith("layer,layer=")
        assert note["chosen"] != "layer,layer=best"
        assert note["peak_memory_mb"] > 50 and note["seconds"].keys() == {"training", "evaluation"}
        said = np.load(note["folder"] / "ilse" / f"{run.id}.npz")
        assert set(said) == set(run.tasks)
        for name in run.tasks:  # what differences are tested on is what was scored
            task = laboratory.task(name)
            scored = laboratory.results.score(run, name if task.kind == "sts" else f"{name}-head")
            assert outcome_score(said[name], task, "test") == pytest.approx(scored, abs=1e-3)
    sts = next(run for run in runs if run.kind == "sts")
    assert laboratory.results.score(sts, "STS12") != laboratory.results.score(sts, "STS12-leakfree")

    loaded = mteb.ResultCache(tmp_path / "out").load_results()  # mteb's own loader reads the folder
    assert {result.model_name for result in loaded.model_results} == {model_name(run) for run in runs}
    assert sum(len(result.task_results) for result in loaded.model_results) == sum(
        len(run.result_names) for run in runs
    )

    before = files_of(tmp_path / "out")
    assert place().perform(runs) == (0, {}) and files_of(tmp_path / "out") == before
    assert not [path for path in (tmp_path / "work").iterdir() if path.is_dir()]  # checkpoints are gone


def test_comparison(place: Callable[..., Laboratory], tmp_path: Path) -> None:
    """Mean and spread of mteb's scores over seeds; differences where outcomes of single examples are there."""
    laboratory = place()
    runs = runs_of(laboratory, tmp_path, methods=[QUICK, "mean"], seeds=[0, 1])
    laboratory.perform(runs)
    rows = {(row["method"], row["result"]): row for row in compare(laboratory.results, runs, laboratory.task, "mean")}
    assert len(rows) == 2 * (3 + 3)
    for (method, name), row in rows.items():
        scores = [
            laboratory.results.score(run, name) for run in runs if run.method == method and name in run.result_names
        ]
        assert (row["mean"], row["spread"]) == pytest.approx((np.mean(scores), np.std(scores, ddof=1)), abs=0.006)
        tested = method != "mean" and name in ("STSBenchmark", "STS12", "Banking77Classification-head")
        assert ("difference" in row) == tested
        if tested:
            difference = row["mean"] - rows["mean", name]["mean"]
            assert row["difference"]["mean"] == pytest.approx(difference, abs=0.011)


def test_a_new_task_or_a_lost_result_is_made_up_for(place: Callable[..., Laboratory], tmp_path: Path) -> None:
    """A run that is asked for other tasks keeps what it has, its outcomes included."""
    laboratory = place()
    (run,) = runs_of(laboratory, tmp_path, tasks=["STSBenchmark"])
    laboratory.perform([run])
    (other,) = runs_of(laboratory, tmp_path, tasks=["STS12"])
    assert other.id == run.id and laboratory.results.missing(other) == ["STS12", "STS12-leakfree"]
    before = laboratory.results.score(run, "STSBenchmark")
    assert laboratory.perform([other]) == (1, {})
    for results in (laboratory.results, place().results):
        assert results.missing(run) == results.missing(other) == [] and results.score(run, "STSBenchmark") == before
        assert {task: len(results.outcomes(run, task)) for task in ("STSBenchmark", "STS12")} == {
            task: len(laboratory.task(task).splits["test"]) for task in ("STSBenchmark", "STS12")
        }
    (laboratory.results.notes[run.id]["folder"] / "STS12.json").unlink()
    assert place().results.missing(other) == ["STS12"]
    assert place().perform([other]) == (1, {}) and place().results.missing(other) == []


def test_another_model_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    """Where training gives other weights than it did, on another machine say, nothing of the first model counts."""
    run = Run("tiny", "set", Recipe(), "STSBenchmark", "sts", 0, ("STSBenchmark", "STS12"))
    said = np.array([0.5, 0.25], dtype=np.float32)
    for revision, task in (("one", "STSBenchmark"), ("two", "STS12")):
        folder = tmp_path / "results" / "ilse__set" / revision
        folder.mkdir(parents=True)
        (folder / f"{task}.json").write_text("{}")
        note = {"run": run.id, "model": "ilse/set", "revision": revision, "results": [task]}
        Results(tmp_path).refresh().add(note, {task: said})
    results = Results(tmp_path).refresh()
    assert results.missing(run) == ["STSBenchmark", "STS12-leakfree"]
    assert results.outcomes(run, "STS12").tolist() == said.tolist()
    assert len(list(tmp_path.rglob("*.npz"))) == 1 and len(results.notes) == 1


def test_a_run_that_fails_does_not_keep_the_others_from_theirs(
    place: Callable[..., Laboratory], tmp_path: Path
) -> None:
    laboratory = place()
    runs = runs_of(laboratory, tmp_path, methods=["set,epochs=2,hidden=8,learning_rate=1e30,dropout=0", QUICK])
    done, failed = laboratory.perform(runs)
    bad = [run for run in runs if "1e30" in run.method or "1e+30" in run.method]
    assert list(failed) == bad and len(bad) == 2 and done == 2
    for run, error in failed.items():
        assert isinstance(error, FloatingPointError)
        assert "FloatingPointError" in (laboratory.work / f"{run.id}.txt").read_text()


WORKER = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from ilse_embed.comparison import compare
from ilse_embed.experiments import Laboratory
from ilse_embed.grid import Results
from test_grid import runs_of
root = Path({root!r})
folders = root / "work", root / "stores", root / "data"
laboratory = Laboratory(Results(root / "out").refresh(), *folders, {{"tiny": {backbone!r}}})
runs = runs_of(laboratory, Path(sys.argv[1]), methods=["set,epochs=25,hidden=8", "mean"], seeds=[0, 1])
print("ready", flush=True)
laboratory.perform(runs, lambda run, what: print(run.id, what, flush=True))
"""


def test_killed_and_shared(
    place: Callable[..., Laboratory], tiny_backbone: Callable[..., Path], tmp_path: Path
) -> None:
    """One process is killed in the middle of a run; two others then share what is left: each run is done once."""
    code = WORKER.format(tests=str(Path(__file__).parent), root=str(tmp_path), backbone=str(tiny_backbone()))
    folders = [tmp_path / name for name in ("first", "second", "third")]
    place()  # makes the data

    def start(folder: Path) -> subprocess.Popen[str]:
        folder.mkdir()
        return subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)

    first = start(folders[0])
    assert first.stdout is not None
    started = next(line.split()[0] for line in first.stdout if line.endswith("starts\n"))
    deadline = time.monotonic() + 60
    while not list((tmp_path / "work" / started).glob("checkpoint-*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert not Results(tmp_path / "out").refresh().notes

    others = [start(folder) for folder in folders[1:]]
    said = "".join(other.communicate(timeout=120)[0] for other in others)
    assert [other.returncode for other in others] == [0, 0]
    laboratory = place()
    runs = runs_of(laboratory, tmp_path, methods=["set,epochs=25,hidden=8", "mean"], seeds=[0, 1])
    begun = [line.split()[0] for line in said.splitlines() if line.endswith("starts")]
    assert sorted(begun) == sorted(run.id for run in runs) and started in begun
    assert all(laboratory.results.missing(run) == [] for run in runs)


def test_command(
    place: Callable[..., Laboratory], ilse: Any, tiny_backbone: Callable[..., Path], tmp_path: Path
) -> None:
    laboratory = place()
    runs_of(laboratory, tmp_path)
    usual = (tmp_path / "grid.toml", "--output", tmp_path / "out", "--data-dir", laboratory.data_dir)
    rest = ("--store", tmp_path / "s", "--work", tmp_path / "w", "--backbone", f"tiny={tiny_backbone()}")
    assert "2 runs, 2 are left" in ilse("grid", "status", *usual).out
    done = ilse("grid", "run", *usual, *rest)
    assert done.code == 0, done.error
    assert "2 runs done here; nothing else is missing" in done.out
    assert "2 runs, 0 are left" in ilse("grid", "status", *usual).out
    shown = ilse("grid", "table", *usual, "--reference", "mean", "--json", tmp_path / "table.json")
    rows = json.loads((tmp_path / "table.json").read_text())["rows"]
    assert shown.code == 0 and len(rows) == 6
    (head,) = (row for row in rows if row["result"] == "Banking77Classification-head")
    row = f"| `{head['method']}` | {head['mean']:.1f} | {head['mean']:.1f} | 1 | {head['parameters']:,} | "
    assert "**Classification, protocol `head`: accuracy of the linear head, %**\n\n| method | Bank" in shown.out
    assert row in shown.out and shown.out.count("\n| `") == 5
    assert ilse("grid", "table", *usual, "--markdown", tmp_path / "table.md").code == 0
    assert row in (tmp_path / "table.md").read_text(encoding="utf-8")
    assert_refused(ilse("grid", "run", *usual, "--backbone", "tiny"), "--backbone is 'tiny'; it must be NAME=FOLDER")
