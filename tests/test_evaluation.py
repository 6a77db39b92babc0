"""mteb: identity, protocols, leak-free similarity, and nothing outside of the output folder. Real mteb, tiny models."""

import json
import shutil
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import mteb
import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from scipy.stats import spearmanr
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize, Transformer
from sklearn.linear_model import LogisticRegression

from ilse_embed import LayerPooling, LayerScaling, LayerTransformer, LinearHead, build_encoder
from ilse_embed.evaluation import evaluate, local_tasks, mock_run, model_meta, mteb_model, without_training_pairs
from ilse_embed.extraction import extract
from ilse_embed.features import CachedLayers
from ilse_embed.model import IlseSentenceTransformer, build, load
from ilse_embed.tasks import load_files, load_task

SHARED = Path(__file__).parents[2] / "shared/data/mteb"
LABELS = ["angry", "calm", "glad", "sad"]
IDS = {"angry": 2, "calm": 0, "glad": 3, "sad": 1}  # not the order of the names
OPENINGS = {"angry": "How dare", "calm": "Slowly drifts", "glad": "Joyfully sings", "sad": "Weeping goes"}
THINGS = ("the ferry", "my sister", "an invoice", "winter", "the harbour", "a train", "the cello", "a tomato")


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    """PoemSentiment with label names, MTOPDomain (multilingual, numbers alone), STSBenchmark, STS12 with 12 leaks."""

    def put(task: str, split: str, rows: list[dict[str, Any]]) -> None:
        (tmp_path / "mirror" / task).mkdir(parents=True, exist_ok=True)
        parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "mirror" / task / f"{split}.parquet")

    for split, number in {"train": 12, "validation": 4, "test": 8}.items():
        poem = [
            {"text": f"{OPENINGS[label]} {THINGS[i % 8]}, {split} {i}.", "label": IDS[label], "label_text": label}
            for i in range(number)
            for label in LABELS
        ]
        put("PoemSentimentClassification", split, poem)
        put("MTOPDomainClassification", split, [{key: row[key] for key in ("text", "label")} for row in poem])
    pairs = [
        {"sentence1": f"{one} leaves {i}.", "sentence2": f"{two} stays {j}.", "score": float((7 * i + 3 * j) % 11) / 2}
        for i, one in enumerate(THINGS)
        for j, two in enumerate(THINGS)
    ]
    put("STSBenchmark", "train", pairs[:40])
    put("STSBenchmark", "test", pairs[40:])
    leaked = [
        {"sentence1": p["sentence2"].upper(), "sentence2": p["sentence1"].replace(".", " ."), "score": p["score"]}
        for p in pairs[:12]
    ]
    put("STS12", "test", leaked + pairs[40:])
    return tmp_path / "mirror"


@pytest.fixture
def make(tiny_backbone: Callable[..., Path]) -> Callable[..., IlseSentenceTransformer]:
    """A model with a head, the same one each time but for what is asked to differ."""

    def make_model(
        name: str = "llama",
        backbone_seed: int = 0,
        seed: int = 0,
        hidden: int = 16,
        scaled: bool = False,
        **options: Any,
    ) -> IlseSentenceTransformer:
        backbone = LayerTransformer(str(tiny_backbone(name, seed=backbone_seed)), **options)
        shape = (backbone.num_layers, backbone.get_embedding_dimension())
        torch.manual_seed(seed)
        encoder, head = build_encoder("set", *shape, hidden=hidden), LinearHead(hidden, LABELS)
        scaling = LayerScaling(*shape) if scaled else None
        model = build(backbone, encoder, scaling=scaling, head=head)
        model.provenance = {"encoder": "set", "training_datasets": ["PoemSentimentClassification"], "task": None}
        return model.eval()

    return make_model


def training_pairs(data_dir: Path) -> list[tuple[str, str]]:
    columns = parquet.read_table(data_dir / "STSBenchmark/train.parquet").to_pydict()
    return list(zip(columns["sentence1"], columns["sentence2"], strict=True))


def score(results: list[Any]) -> list[float]:
    return [result.get_score() for result in results]


# ------------------------------------------------------------------------------------------------------------ identity


def test_meta_tells_what_can_be_known(make: Callable[..., IlseSentenceTransformer]) -> None:
    model = make(scaled=True, max_seq_length=64)
    llm = model[0].model
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        meta = mteb_model(model).mteb_model_meta
    assert meta.name.startswith("ilse/set-llama") and len(meta.revision) == 12 and int(meta.revision, 16)
    assert meta.n_parameters == sum(p.numel() for p in model.parameters())
    assert meta.n_embedding_parameters == llm.get_input_embeddings().weight.numel()
    assert meta.memory_usage_mb >= 4 * meta.n_parameters / 2**20
    assert (meta.embed_dim, meta.max_tokens, meta.similarity_fn_name) == (16, 64, "cosine")
    assert meta.training_datasets == {"PoemSentimentClassification"} and meta.languages == ["eng-Latn"]
    assert meta.adapted_from == Path(model[0].backbone).name and "Sentence Transformers" in meta.framework
    assert not meta.is_zero_shot_on(["PoemSentimentClassification"]) and meta.is_zero_shot_on(["STS12"])
    json.dumps(meta.to_dict(), default=str)
    model.provenance = {}
    assert model_meta(model).training_datasets is None


@pytest.mark.parametrize("name", ["plain", "a/b/c", "a /b", "/b", ""])
def test_meta_name(make: Callable[..., IlseSentenceTransformer], name: str) -> None:
    model = make()
    assert model_meta(model, name="me/mine-1.0").name == "me/mine-1.0"
    with pytest.raises(ValueError, match='mteb needs "organisation/name"'):
        model_meta(model, name=name)


def change_head(model: SentenceTransformer) -> None:
    with torch.no_grad():
        next(m for m in model if isinstance(m, LinearHead)).linear.bias[0] += 1e-6


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"hidden": 8},
        {"scaled": True},
        {"pooling": "mean_without_first"},
        {"include_prompt": False},
        {"max_seq_length": 17},
        {"backbone_seed": 1},
        {"name": "qwen3"},
        {"model_kwargs": {"dtype": torch.bfloat16}},
        change_head,
        lambda model: model.prompts.update(STS="Compare: "),
        lambda model: setattr(model, "similarity_fn_name", "dot"),
        lambda model: setattr(model, "truncate_dim", 4),
        lambda model: model.pop(len(model) - 1),
    ],
    ids=str,
)
def test_what_changes_the_revision(make: Callable[..., IlseSentenceTransformer], change: Any) -> None:
    first, second = make(), make(**change) if isinstance(change, dict) else make()
    if callable(change):
        assert model_meta(first).revision == model_meta(second).revision
        change(second)
    assert model_meta(first).revision != model_meta(second).revision


def test_what_leaves_the_revision(make: Callable[..., IlseSentenceTransformer], tmp_path: Path) -> None:
    model = make()
    moved = shutil.copytree(model[0].backbone, tmp_path / "moved")
    model.save(str(tmp_path / "saved"))
    shutil.copytree(tmp_path / "saved", tmp_path / "elsewhere" / "copy")
    cached = CachedLayers(extract(model[0], ["a text"]), model[0])
    same = [
        make(),
        load(tmp_path / "saved"),
        load(tmp_path / "elsewhere" / "copy", backbone=moved),
        build(LayerTransformer(str(moved)), *(model[i] for i in (1,)), head=model[2]),
        build(cached, model[1], head=model[2]),
        SentenceTransformer(modules=list(model)),
    ]
    assert {model_meta(other).revision for other in same} == {model_meta(model).revision}
    assert model_meta(load(tmp_path / "elsewhere" / "copy", backbone=moved)).name == model_meta(model).name
    assert model_meta(same[4]).n_parameters == model_meta(model).n_parameters


def test_identity_without_our_backbone(make: Callable[..., IlseSentenceTransformer]) -> None:
    """A stock Transformer is hashed tensor by tensor; cached layers of an unknown backbone have no identity."""
    model = make()
    stock = Transformer(model[0].backbone, config_kwargs={"output_hidden_states": True})
    assembled = SentenceTransformer(modules=[stock, LayerPooling(), model[1], Normalize()])
    before = model_meta(assembled)
    assert before.n_parameters == sum(p.numel() for p in assembled.parameters()) and before.name == "ilse/set-unknown"
    with torch.no_grad():
        next(stock.parameters())[0, 0] += 1
    assert model_meta(assembled).revision != before.revision
    nameless = build(CachedLayers(extract(model[0], ["a text"])), model[1])
    with pytest.raises(ValueError, match="do not know which backbone"):
        model_meta(nameless)


def test_two_models_never_share_a_result(
    make: Callable[..., IlseSentenceTransformer], mirror: Path, tmp_path: Path
) -> None:
    first, second = make(), make(seed=1)
    assert model_meta(first).name == model_meta(second).name
    scores = [score(evaluate(model, ["STS12"], mirror, output=tmp_path / "out")) for model in (first, second)]
    assert scores[0] != scores[1]
    alone = score(evaluate(second, ["STS12"], mirror))
    assert scores[1] == pytest.approx(alone, abs=1e-6)
    folders = sorted(path.parent.name for path in (tmp_path / "out/results").glob("*/*/STS12.json"))
    assert folders == sorted(model_meta(model).revision for model in (first, second))
    second.prompts["STS"] = "Compare: "  # changed in place: again another model
    assert score(evaluate(second, ["STS12"], mirror, output=tmp_path / "out")) != scores[1]


def test_results_are_kept_and_found_again(
    make: Callable[..., IlseSentenceTransformer], mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make()
    before = score(evaluate(model, ["STS12"], mirror, output=tmp_path / "out", name="me/mine"))
    file = tmp_path / "out/results/me__mine" / model_meta(model).revision / "STS12.json"
    written = json.loads(file.read_text())
    assert written["dataset_revision"] == mteb.get_task("STS12").metadata.dataset["revision"]
    monkeypatch.setattr(type(model), "encode", lambda *a, **k: pytest.fail("encoded again"))
    assert score(evaluate(model, ["STS12"], mirror, output=tmp_path / "out", name="me/mine")) == pytest.approx(
        before, abs=1e-5
    )


# ----------------------------------------------------------------------------------------------------------- protocols


@pytest.mark.parametrize("name", ["STS12", "STSBenchmark", "PoemSentimentClassification"])
def test_probe_is_plain_mteb(
    make: Callable[..., IlseSentenceTransformer],
    mirror: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """The same figures as mteb on the bare model, with the data read by mteb itself."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    model = make()
    task = mteb.get_task(name, eval_splits=["test"])
    local = {"path": str(mirror / name), "revision": task.metadata.dataset["revision"]}
    task.metadata = task.metadata.model_copy(update={"dataset": local})
    plain = mteb.evaluate(SentenceTransformer(modules=list(model)), task, cache=None, co2_tracker=False)
    (ours,) = evaluate(model, [name], mirror, output=tmp_path / "out")
    expected, got = plain.task_results[0].scores["test"][0], ours.scores["test"][0]
    numbers = {key: value for key, value in expected.items() if isinstance(value, float)}
    assert {key: got[key] for key in numbers} == pytest.approx(numbers, abs=1e-6, nan_ok=True)
    assert ours.task_name == name


def test_full_probe(make: Callable[..., IlseSentenceTransformer], mirror: Path, tmp_path: Path) -> None:
    model = make()
    task = load_task("PoemSentimentClassification", mirror)
    train, test = task.splits["train"], task.splits["test"]
    probe = LogisticRegression(max_iter=100, random_state=42).fit(model.encode(train.texts), train.labels)
    by_hand = float(np.mean(probe.predict(model.encode(test.texts)) == np.array(test.labels)))
    for protocol in ("probe", "full-probe"):
        (result,) = evaluate(model, ["PoemSentimentClassification"], mirror, protocol=protocol, output=tmp_path)
        assert result.task_name == "PoemSentimentClassification" + ("" if protocol == "probe" else "-full-probe")
    assert result.get_score() == pytest.approx(by_hand, abs=1e-6)
    assert len(result.scores["test"][0]["scores_per_experiment"]) == 1
    names = {path.name for path in tmp_path.glob("results/*/*/Poem*.json")}
    assert names == {"PoemSentimentClassification.json", "PoemSentimentClassification-full-probe.json"}


@pytest.mark.parametrize("name", ["PoemSentimentClassification", "MTOPDomainClassification"])
def test_head_protocol_is_the_head(make: Callable[..., IlseSentenceTransformer], mirror: Path, name: str) -> None:
    """Labels are matched by name; the head reads the embedding before Normalize; truncation does not reach it."""
    task = load_task(name, mirror)
    model = make()
    head = next(m for m in model if isinstance(m, LinearHead))
    head.labels = sorted(task.labels, reverse=True)
    head.linear.bias.data = torch.tensor([3.0, 0.0, -2.0, 1.0])  # argmax differs on normalised embeddings
    test = task.splits["test"]
    by_hand = float(np.mean(np.array(model.predict(test.texts)) == np.array(test.labels)))
    model.truncate_dim = 3
    (result,) = evaluate(model, [name], mirror, protocol="head")
    assert result.task_name == f"{name}-head" and set(result.scores) == {"test"}
    assert result.get_score() == pytest.approx(by_hand, abs=1e-9)
    assert 0 < by_hand < 1


def test_head_trained_without_names(make: Callable[..., IlseSentenceTransformer], mirror: Path) -> None:
    """A head that knows the classes by number fits data which have names too."""
    model = make()
    head = next(m for m in model if isinstance(m, LinearHead))
    named = score(evaluate(model, ["PoemSentimentClassification"], mirror, protocol="head"))
    head.labels = [str(IDS[label]) for label in LABELS]
    assert score(evaluate(model, ["PoemSentimentClassification"], mirror, protocol="head")) == named


@pytest.mark.parametrize(
    ("tasks", "options", "words"),
    [
        (["STS12"], {"protocol": "head"}, "'head' is for classification; score STS12 with 'probe'"),
        (["STS12"], {"protocol": "full-probe"}, "'full-probe' is for classification"),
        (["PoemSentimentClassification"], {"leak_free": True}, "leak_free is for STS tasks"),
        (["PoemSentimentClassification"], {"protocol": "knn"}, r'allowed are \["probe", "full-probe", "head"\]'),
        (["PoemSentimentClassification"], {"overwrite": "sometimes"}, "sometimes"),
        (["STS99"], {}, "no English task"),
    ],
)
def test_evaluate_refuses(
    make: Callable[..., IlseSentenceTransformer], mirror: Path, tasks: list[str], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        evaluate(make(), tasks, mirror, **options)


def test_head_protocol_refuses(make: Callable[..., IlseSentenceTransformer], mirror: Path) -> None:
    model = make()
    with pytest.raises(ValueError, match=r"needs a LinearHead in the model; it has \['LayerTransformer', 'DeepSets'"):
        evaluate(build(model[0], model[1]), ["PoemSentimentClassification"], mirror, protocol="head")
    with pytest.raises(ValueError, match=r"the head knows 4 labels .*angry.* MTOPDomainClassification has 4"):
        evaluate(model, ["MTOPDomainClassification"], mirror, protocol="head")


def test_prompts_of_renamed_tasks(make: Callable[..., IlseSentenceTransformer], mirror: Path) -> None:
    """A prompt for a task also holds under its other protocols; mteb looks prompts up by the task's name."""
    model = make()
    texts = load_task("PoemSentimentClassification", mirror).splits["test"]
    prompt = "Mood of the verse: "
    wanted = np.mean(np.array(model.predict([prompt + text for text in texts.texts])) == np.array(texts.labels))
    asked: list[Any] = []
    encode = model.encode
    model.__dict__["encode"] = lambda *args, **kwargs: (asked.append(kwargs["prompt"]), encode(*args, **kwargs))[1]
    model.prompts["PoemSentimentClassification"] = prompt
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (result,) = evaluate(model, ["PoemSentimentClassification"], mirror, protocol="head")
    assert set(asked) == {prompt} and result.get_score() == pytest.approx(float(wanted), abs=0.1)


def test_cached_layers_score_as_the_live_model(
    make: Callable[..., IlseSentenceTransformer], mirror: Path, tmp_path: Path
) -> None:
    live = make()
    names = ["STS12", "PoemSentimentClassification"]
    texts = [text for name in names for text in load_task(name, mirror).texts()]
    cached = build(CachedLayers(extract(live[0], texts), live[0]), live[1], head=live[2])
    cached.provenance = live.provenance
    first = evaluate(cached, names, mirror, output=tmp_path / "cached")
    assert score(first) == pytest.approx(score(evaluate(live, names, mirror)), abs=1e-6)
    head = [evaluate(m, names[1:], mirror, protocol="head") for m in (live, cached)]
    assert score(head[0]) == score(head[1])
    (folder,) = (tmp_path / "cached/results").glob("*/*/STS12.json")
    assert folder.parent.name == model_meta(live).revision


@pytest.mark.parametrize("name", ["quickstart-sts", "quickstart-intents"])
def test_built_in_tasks(make: Callable[..., IlseSentenceTransformer], tmp_path: Path, name: str) -> None:
    task = load_task(name)
    live = make()
    head = LinearHead(16, task.labels) if task.kind == "classification" else None
    model = build(CachedLayers(extract(live[0], task.texts()), live[0]), live[1], head=head)
    (result,) = evaluate(model, [name], protocol="probe" if head is None else "head", output=tmp_path)
    test = task.splits["test"]
    if head is None:
        cosines = (model.encode(test.sentence1) * model.encode(test.sentence2)).sum(1)
        assert result.get_score() == pytest.approx(float(spearmanr(cosines, test.scores).statistic), abs=1e-4)
    else:
        assert result.get_score() == np.mean(np.array(model.predict(test.texts)) == np.array(test.labels))
        train = task.splits["train"]
        probe = LogisticRegression(max_iter=100, random_state=42).fit(model.encode(train.texts), train.labels)
        by_hand = np.mean(probe.predict(model.encode(test.texts)) == np.array(test.labels))
        (result,) = evaluate(model, [task], protocol="full-probe")
        assert result.task_name == "quickstart-intents-full-probe"
        assert result.get_score() == pytest.approx(by_hand, abs=0.02)


def test_own_files(make: Callable[..., IlseSentenceTransformer], tmp_path: Path) -> None:
    """The revision of an own task is its content, so that an edited file is scored again."""
    model, revisions = make(), []
    for score_of_last in (1, 5):
        rows = [
            f"{a} leaves,{b} stays,{(i * 7) % 6}" for i, (a, b) in enumerate(zip(THINGS, THINGS[::-1], strict=True))
        ]
        file = tmp_path / "my pairs.csv"
        file.write_text("\n".join(["sentence1,sentence2,score", *rows, f"a,b,{score_of_last}"]))
        (result,) = evaluate(model, [load_files(file, file, file)], output=tmp_path / "out")
        revisions.append((result.dataset_revision, round(result.get_score(), 6)))
        assert result.task_name == "my-pairs"
    assert revisions[0][0] != revisions[1][0] and revisions[0][1] != revisions[1][1]
    with pytest.raises(ValueError, match=r"'my pairs' lacks \['test'\]"):
        evaluate(model, [load_files(file, file)])


# ----------------------------------------------------------------------------------------------------------- leak-free


def test_leak_free(make: Callable[..., IlseSentenceTransformer], mirror: Path, tmp_path: Path, caplog: Any) -> None:
    model = make()
    task = local_tasks(["STS12"], mirror)[0]
    free, left_out = without_training_pairs(task, training_pairs(mirror))
    assert (left_out, free.metadata.name, task.metadata.name) == (12, "STS12-leakfree", "STS12")
    assert len(free.dataset["test"]) == 24 and len(task.dataset["test"]) == 36
    with caplog.at_level("INFO", logger="ilse_embed"):
        (result,) = evaluate(model, ["STS12"], mirror, leak_free=True, output=tmp_path / "out")
    assert "STS12-leakfree: left out 12 of 36 test pairs" in caplog.text
    (standard,) = evaluate(model, ["STS12"], mirror, output=tmp_path / "out")
    assert [result.task_name, standard.task_name] == ["STS12-leakfree", "STS12"]
    (kept,) = evaluate(model, ["STSBenchmark"], mirror)  # in this mirror STSBenchmark's test is what is left of STS12
    assert result.get_score() == pytest.approx(kept.get_score(), abs=1e-6) != standard.get_score()


def test_data_from_the_hub(
    make: Callable[..., IlseSentenceTransformer], mirror: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a mirror mteb loads the data, also where a protocol needs them before."""
    folders = {mteb.get_task(path.name).metadata.dataset["path"]: path for path in mirror.iterdir()}

    def load_dataset(path: str, **options: Any) -> datasets.DatasetDict:
        tables = {file.stem: parquet.read_table(file) for file in folders[path].glob("*.parquet")}
        return datasets.DatasetDict({split: datasets.Dataset(table) for split, table in tables.items()})

    monkeypatch.setattr("mteb.abstasks.abstask.load_dataset", load_dataset)
    model = make()
    for names, options in {
        ("STS12",): {"leak_free": True},
        ("STS12", "PoemSentimentClassification"): {},
        ("PoemSentimentClassification",): {"protocol": "head"},
    }.items():
        hub, local = (evaluate(model, names, place, **options) for place in (None, mirror))
        assert score(hub) == pytest.approx(score(local), abs=1e-6)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the mirror of the benchmark data is not here")
def test_leaks_of_the_real_tasks() -> None:
    train = training_pairs(SHARED)
    tasks = local_tasks(["STS12", "STS13", "STS14", "STS15", "STS16"], SHARED)
    assert [without_training_pairs(task, train)[1] for task in tasks] == [1002, 597, 1861, 1102, 197]


@pytest.mark.skipif(not SHARED.is_dir(), reason="the mirror of the benchmark data is not here")
def test_shared_mirror_as_mteb_tasks() -> None:
    sizes = {"Banking77Classification": 3080, "MTOPIntentClassification": 4386, "BIOSSES": 100, "SICK-R": 9927}
    for task, (name, size) in zip(local_tasks(sizes, SHARED), sizes.items(), strict=True):
        official = mteb.get_task(name).metadata
        assert (task.eval_splits, task.metadata.name, len(task.hf_subsets)) == (["test"], name, 1)
        assert task.metadata.dataset == official.dataset and task.data_loaded
        data = task.dataset["en"] if official.is_multilingual else task.dataset
        assert len(data["test"]) == size


# ---------------------------------------------------------------------------------------------- mock tasks, isolation


def test_mock_run_of_a_saved_model(make: Callable[..., IlseSentenceTransformer], tmp_path: Path) -> None:
    make().save(str(tmp_path / "model"))
    results = mock_run(str(tmp_path / "model")).task_results
    ran = {name: result for name, result in results.items() if result is not None}
    assert len(ran) >= 20 and all(hasattr(result, "scores") for result in ran.values()), ran


def test_offline_and_nothing_outside_of_output(
    make: Callable[..., IlseSentenceTransformer], mirror: Path, tmp_path: Path
) -> None:
    """In a process whose sockets are blocked and whose home is empty."""
    make().save(str(tmp_path / "model"))
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    code = f"""
        import os, socket
        def refuse(*args, **kwargs):
            raise AssertionError("network")
        socket.socket.connect = socket.getaddrinfo = socket.create_connection = refuse
        before = dict(os.environ)
        from ilse_embed.evaluation import evaluate
        changed = set(os.environ.items()) ^ set(before.items())  # torch and others set their own
        assert not [key for key, _ in changed if key.startswith(("HF_", "MTEB_", "TRANSFORMERS_"))], changed
        names = ["STS12", "PoemSentimentClassification", "MTOPDomainClassification"]
        evaluate({str(tmp_path / "model")!r}, names, {str(mirror)!r}, output="out")
        evaluate({str(tmp_path / "model")!r}, names[1:2], {str(mirror)!r}, protocol="head", output="out")
        evaluate({str(tmp_path / "model")!r}, names[:1], {str(mirror)!r}, leak_free=True, output="out")
    """
    home = tmp_path / "home"
    home.mkdir()
    environment = {"HOME": str(home), "OMP_NUM_THREADS": "1", "PATH": "", "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    written = {path for path in tmp_path.rglob("*") if path.is_file()} - before
    assert {path.parent.parent.parent for path in written} == {tmp_path / "out/results"}, written
    assert sorted(path.name for path in written) == [
        "MTOPDomainClassification.json",
        "PoemSentimentClassification-head.json",
        "PoemSentimentClassification.json",
        "STS12-leakfree.json",
        "STS12.json",
        "model_meta.json",
        "run_settings.jsonl",
    ]
