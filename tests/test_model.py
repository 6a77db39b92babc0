"""Models as artifacts: what was saved loads, with the package and without, after a crash, on a moved backbone."""

import ast
import copy
import json
import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from conftest import SENTENCES
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize, Transformer

import ilse_embed
from ilse_embed import (
    CayleyGNN,
    LayerPooling,
    LayerScaling,
    LayerTransformer,
    LinearHead,
    build,
    build_encoder,
    export_hub,
    load,
)
from ilse_embed.encoders import ENCODERS
from ilse_embed.evaluation import model_meta
from ilse_embed.extraction import extract
from ilse_embed.model import IlseSentenceTransformer, standalone_source

TEXTS = [*SENTENCES, "", " ", "a\x00b", "cut off \ud83d", "<|endoftext|>", "long " * 900, "👩‍👩‍👧‍👦 e\u0301"]
LABELS = ["zürich", "new york", "", "  two  spaces ", "naïve\t漢字", "😀", "true", "0"]
PROVENANCE = {"task": "toy-ü", "training_datasets": ["toy"], "encoder": "cayley", "seed": 3, "validation": 71.25}
PROVENANCE |= {"recipe": {"name": "default,epochs=3"}}

Make = Callable[..., IlseSentenceTransformer]


@pytest.fixture
def make(tiny_backbone: Callable[..., Path]) -> Make:
    def make_model(
        name: str = "llama",
        encoder: str = "cayley",
        head: bool = True,
        scaled: bool = True,
        normalize: bool = True,
        folder: Path | None = None,
        seed: int = 0,
        **options: Any,
    ) -> IlseSentenceTransformer:
        folder = folder or tiny_backbone(name)  # drawn with a seed of its own
        torch.manual_seed(seed)
        usual = {"max_seq_length": 64, "on_truncate": "ignore"}
        backbone = LayerTransformer(str(folder), **usual | options)
        shape = (backbone.num_layers, backbone.get_embedding_dimension())
        fusion = build_encoder(encoder, *shape, **({"hidden": 24} if encoder in ("cayley", "set") else {}))
        for tensor in fusion.parameters():  # gates start at 0, which would hide the graph
            torch.nn.init.normal_(tensor, std=0.3)
        scaling = LayerScaling.fit(torch.randn(20, *shape) * 3 + 1) if scaled else None
        classifier = LinearHead(fusion.get_embedding_dimension(), LABELS) if head else None
        model = build(backbone, fusion, scaling, classifier, normalize=normalize)
        model.provenance = copy.deepcopy(PROVENANCE)
        return model

    return make_model


def embed(model: SentenceTransformer) -> np.ndarray:
    return model.encode(TEXTS, batch_size=8)


def equal(one: SentenceTransformer, other: SentenceTransformer) -> bool:
    return np.array_equal(embed(one), embed(other))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def python(code: str, *arguments: Any, home: Path) -> subprocess.Popen[str]:
    """A fresh process with a cache of its own."""
    environment = os.environ | {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


# ----------------------------------------------------------------------------------------------------------- round trip


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"name": "bert", "encoder": "set", "head": False},
        {"name": "gpt2", "encoder": "layer", "scaled": False},
        {"name": "qwen3", "encoder": "mean", "normalize": False},
        {"pooling": "mean_without_first", "max_seq_length": 17, "include_prompt": False},
        {"name": "gemma2", "encoder": "gnn", "pooling": "mean_after_bos"},
        {"name": "bloom", "head": False, "scaled": False},
    ],
    ids=str,
)
def test_saved_and_loaded_is_bit_equal(make: Make, tmp_path: Path, options: dict[str, Any]) -> None:
    model = make(**options)
    before = embed(model)
    path = tmp_path / "a" / "model of mine"
    model.save(str(path))
    again = load(path)
    assert isinstance(again, IlseSentenceTransformer)
    assert np.array_equal(embed(again), before) and before.dtype == np.float32 and np.isfinite(before).all()
    assert [type(module) for module in again] == [type(module) for module in model]
    record = json.loads((path / "ilse.json").read_text())
    assert again.provenance == PROVENANCE == {key: record[key] for key in record if key != "files"}
    assert record["files"] == sorted(entry.name for entry in path.iterdir())
    assert again.max_seq_length == model.max_seq_length and again[0].pooling == model[0].pooling
    lengths_are_1 = np.abs(np.linalg.norm(before, axis=1) - 1) < 1e-5
    assert lengths_are_1.all() if options.get("normalize", True) else not lengths_are_1.any()
    again.save(str(tmp_path / "b"))
    assert equal(load(str(tmp_path / "b")), model)
    assert contents(tmp_path / "b") == contents(path)


def test_the_artifact_is_the_head_alone(make: Make, tmp_path: Path) -> None:
    model = make(encoder="set")
    model.save_pretrained(str(tmp_path))
    files = contents(tmp_path)
    assert all(len(content) < 6e6 for content in files.values())
    assert {Path(name).suffix for name in files} <= {".json", ".safetensors", ".md", ".jinja", ".txt"}
    assert not any(content.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x04")) for content in files.values())
    tensors = [name for name in files if name.endswith(".safetensors")]
    assert sorted(tensors) == [
        f"{i}_{k}/model.safetensors" for i, k in [(1, "LayerScaling"), (2, "DeepSets"), (3, "LinearHead")]
    ]
    trained = sum(t.nbytes for module in list(model)[1:] for t in module.state_dict().values())
    assert trained < sum(len(files[name]) for name in tensors) < trained + 2000
    index = {part["type"] for part in json.loads(files["modules.json"])}
    own = {f"ilse_embed.{name}" for name in ("LayerTransformer", "LayerScaling", "DeepSets", "LinearHead")}
    assert index == own | {"sentence_transformers.base.modules.normalize.Normalize"}
    assert json.loads(files["config_sentence_transformers.json"])["requirements"]["ilse-embed"]["specifier"].startswith(
        ">="
    )


def test_with_its_backbone(make: Make, tmp_path: Path, tiny_backbone: Callable[..., Path]) -> None:
    """save_backbone: the artifact needs nothing beside it; saved again without, the copy is gone."""
    folder = shutil.copytree(tiny_backbone(), tmp_path / "backbone")
    model = make(folder=folder, save_backbone=True)
    before = embed(model)
    model.save(str(tmp_path / "model"))
    assert "saved with it" in (tmp_path / "model/README.md").read_text()
    folder.rename(tmp_path / "elsewhere")
    again = load(tmp_path / "model")
    assert np.array_equal(embed(again), before)
    assert (tmp_path / "model/model.safetensors").stat().st_size > 50_000
    again[0].save_backbone = False
    again.save(str(tmp_path / "model"))
    assert not (tmp_path / "model/model.safetensors").exists() and not (tmp_path / "model/config.json").exists()


IN_A_FRESH_PROCESS = """
    import sys
    import numpy as np
    from sentence_transformers import SentenceTransformer
    path, texts, out = sys.argv[1:]
    texts = eval(open(texts, encoding="utf-8").read())
    assert not [name for name in sys.modules if name.startswith("ilse_embed")]
    try:
        SentenceTransformer(path)
    except ValueError as error:
        assert "trust_remote_code" in str(error), error
    else:
        sys.exit("loaded without the flag")
    assert "ilse_embed" not in sys.modules
    model = SentenceTransformer(path, trust_remote_code=True)
    np.save(out, model.encode(texts, batch_size=8))
"""

WITHOUT_THE_PACKAGE = """
    import sys
    class Absent:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] == "ilse_embed":
                raise ModuleNotFoundError("No module named 'ilse_embed'")
    sys.meta_path.insert(0, Absent())
    import numpy as np
    from sentence_transformers import SentenceTransformer
    path, texts, out, again = sys.argv[1:]
    texts = eval(open(texts, encoding="utf-8").read())
    model = SentenceTransformer(path, trust_remote_code=True)
    first = model.encode(texts, batch_size=8)
    np.save(out, first)
    model.save(again)
    model = SentenceTransformer(again, trust_remote_code=True)
    assert np.array_equal(model.encode(texts, batch_size=8), first)
    assert "ilse_embed" not in sys.modules
    homes = {type(module).__module__.split(".")[0] for module in model}
    assert homes == {"transformers_modules", "sentence_transformers"}
"""


def test_fresh_processes(make: Make, tmp_path: Path) -> None:
    """With the flag and the package never imported; from an export, with no package; without the flag it is refused."""
    model = make(include_prompt=False)
    saved, exported, again = (tmp_path / name for name in ("saved", "exported", "again"))
    model.save(str(saved))
    model[0].save_backbone = True
    export_hub(model, exported)
    (tmp_path / "texts").write_text(ascii(TEXTS))
    processes = [
        python(IN_A_FRESH_PROCESS, saved, tmp_path / "texts", tmp_path / "1.npy", home=tmp_path / "home"),
        python(WITHOUT_THE_PACKAGE, exported, tmp_path / "texts", tmp_path / "2.npy", again, home=tmp_path / "home2"),
    ]
    for process in processes:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
    before = embed(model)
    assert np.array_equal(np.load(tmp_path / "1.npy"), before)
    assert np.array_equal(np.load(tmp_path / "2.npy"), before)
    assert "requirements" not in json.loads((exported / "config_sentence_transformers.json").read_text())
    for folder in (exported, again):  # and with the package the same
        assert np.array_equal(embed(load(folder)), before)


def test_an_export_has_every_encoder() -> None:
    classes = {node.name for node in ast.parse(standalone_source()).body if isinstance(node, ast.ClassDef)}
    assert classes >= {encoder.__name__ for encoder in ENCODERS.values()}


def test_an_export_tells_no_path_of_this_machine(
    make: Make, tmp_path: Path, tiny_backbone: Callable[..., Path]
) -> None:
    """A backbone that only this machine has is refused, or it comes along."""
    model, folder = make(), tiny_backbone()
    with pytest.raises(
        ValueError, match=rf"the backbone is the folder {folder}, .*backbone=\"org/name\"\) or save_backbone=True"
    ):
        export_hub(model, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    for name, options in {"copied": {"save_backbone": True}, "named": {"backbone": "org/name"}}.items():
        export_hub(make(**options), tmp_path / name)
        for file, content in contents(tmp_path / name).items():
            assert str(folder.parent).encode() not in content, file
        moved = folder if name == "named" else None
        assert equal(load(tmp_path / name, backbone=moved), model)
    assert json.loads((tmp_path / "named/sentence_bert_config.json").read_text())["backbone"] == "org/name"


@pytest.mark.slow
def test_several_processes(make: Make, tmp_path: Path) -> None:
    make().save(str(tmp_path))
    model = load(tmp_path)
    before = model.encode(TEXTS[:9], batch_size=1)
    many = model.encode(TEXTS[:9], batch_size=1, device=["cpu", "cpu"], chunk_size=3)
    np.testing.assert_allclose(many, before, atol=1e-6)


def test_from_the_hub(make: Make, tmp_path: Path) -> None:
    """By name, from a cache as the hub's client leaves it; the provenance comes along."""
    model, commit = make(), "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--someone--cayley"
    model.save(str(repository / "snapshots" / commit))
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(commit)
    again = load("someone/cayley", cache_folder=str(tmp_path))
    assert equal(again, model) and again.provenance == PROVENANCE
    assert load("someone/cayley", cache_folder=str(tmp_path), revision=commit).labels == LABELS


# ----------------------------------------------------------------------------------------------------- another backbone


def test_moved_backbone(make: Make, tmp_path: Path, tiny_backbone: Callable[..., Path]) -> None:
    folder = shutil.copytree(tiny_backbone(), tmp_path / "here")
    model = make(folder=folder)
    before = embed(model)
    model.save(str(tmp_path / "model"))
    moved = folder.rename(tmp_path / "there")
    with pytest.raises(
        FileNotFoundError, match=r"the backbone '.*/here' of .*ilse_embed.load\(path, backbone=\.\.\.\)"
    ):
        load(tmp_path / "model")
    for backbone in (moved, str(moved)):
        assert np.array_equal(embed(load(tmp_path / "model", backbone=backbone)), before)


@pytest.mark.parametrize(
    ("recorded", "given", "refers_to"),
    [
        (None, "{there}", "{there}"),
        (None, "there", "{there}"),
        (None, None, "{here}"),
        ("org/name", "{there}", "org/name"),
        ("{gone}", "{there}", "{there}"),
    ],
)
def test_saved_again_with_a_moved_backbone(
    make: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tiny_backbone: Callable[..., Path],
    recorded: str | None,
    given: str | None,
    refers_to: str,
) -> None:
    """A folder is replaced by the one that was given, for the next load; a name on the hub stays."""
    monkeypatch.chdir(tmp_path)
    names = {name: str(tmp_path / name) for name in ("here", "there", "gone")}
    for name in ("here", "there"):
        shutil.copytree(tiny_backbone(), names[name])
    model = make(folder=Path(names["here"]), backbone=recorded and recorded.format(**names))
    model.save("model")
    again = load("model", backbone=given and given.format(**names))
    again.save("again")
    assert json.loads(Path("again/sentence_bert_config.json").read_text())["backbone"] == refers_to.format(**names)
    if "/name" not in refers_to:
        assert equal(load("again"), model)
    assert (model_meta(again).name, model_meta(again).revision) == (model_meta(model).name, model_meta(model).revision)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"num_hidden_layers": 2}, "layers 3 where the artifact needs 4"),
        ({"hidden_size": 48}, "width 48 where the artifact needs 32"),
        (
            {"num_hidden_layers": 4, "hidden_size": 16},
            "layers 5 where the artifact needs 4; width 16 where .* needs 32",
        ),
        ({"tokenizer": "chat"}, r"tokenizer \(hash\) [0-9a-f]{16} where the artifact needs [0-9a-f]{16}"),
    ],
)
def test_wrong_backbone(
    make: Make, tmp_path: Path, tiny_backbone: Callable[..., Path], other: dict[str, Any], message: str
) -> None:
    make().save(str(tmp_path / "model"))
    with pytest.raises(ValueError, match=f"is not the backbone of this artifact: it has {message}"):
        load(tmp_path / "model", backbone=tiny_backbone(**other))


def test_other_weights_are_told(
    make: Make, tmp_path: Path, tiny_backbone: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    make().save(str(tmp_path / "model"))
    with caplog.at_level(logging.WARNING):
        load(tmp_path / "model")
        assert "other weights" not in caplog.text
        load(tmp_path / "model", backbone=tiny_backbone(seed=1))
    assert "other weights" in caplog.text


# ------------------------------------------------------------------------------------------------------ wrong artifacts


@pytest.mark.parametrize("how", ["missing", "relative", "empty", "only weights", "file", "name", "bare name"])
def test_nothing_to_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights/model.safetensors").touch()
    (tmp_path / "file").touch()
    path, error, message = {
        "missing": (tmp_path / "no such", FileNotFoundError, "there is no folder /"),
        "relative": ("./no-such", FileNotFoundError, "there is no folder"),
        "empty": (tmp_path / "empty", FileNotFoundError, r"empty holds no saved model \(no modules.json\)"),
        "only weights": ("weights", FileNotFoundError, r"weights holds no saved model \(no modules.json\)"),
        "file": (tmp_path / "file", FileNotFoundError, "there is no folder"),
        "name": (
            "no-one/no-such",
            FileNotFoundError,
            "no folder no-one/no-such, and no saved model no-one/no-such on the hub",
        ),
        "bare name": (
            "no-such",
            FileNotFoundError,
            "there is no folder no-such, and no saved model no-such on the hub",
        ),
    }[how]
    with pytest.raises(error, match=message):
        load(path)


def test_a_model_of_another_kind(tmp_path: Path, tiny_backbone: Callable[..., Path]) -> None:
    SentenceTransformer(modules=[Transformer(str(tiny_backbone()))]).save(str(tmp_path))
    with pytest.raises(ValueError, match=r"has no layer encoder, only \['Transformer'\]"):
        load(tmp_path)


def test_the_spelt_out_pipeline(tmp_path: Path, tiny_backbone: Callable[..., Path]) -> None:
    """Stock Transformer with all hidden states, LayerPooling, encoder, Normalize: the same embedding, and it loads."""
    folder = str(tiny_backbone("mistral"))
    stock = Transformer(folder, config_kwargs={"output_hidden_states": True}, max_seq_length=64)
    encoder = CayleyGNN(4, 32, hidden=8)
    spelt_out = IlseSentenceTransformer(modules=[stock, LayerPooling(), encoder, Normalize()])
    short = build(LayerTransformer(folder, pooling="mean", max_seq_length=64), encoder)
    texts = list(SENTENCES)
    np.testing.assert_allclose(spelt_out.encode(texts), short.encode(texts), atol=1e-5)
    spelt_out.save(str(tmp_path))
    assert np.array_equal(load(tmp_path).encode(texts), spelt_out.encode(texts))


@pytest.mark.parametrize(
    "reference", ["ilse_embed.weights.smollm2", "ilse_embed.model.import_from_string", "ilse_embed.os", "os.system"]
)
def test_only_our_own_modules_need_no_flag(make: Make, tmp_path: Path, reference: str) -> None:
    make().save(str(tmp_path))
    index = json.loads((tmp_path / "modules.json").read_text())
    index[1]["type"] = reference
    (tmp_path / "modules.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="trust_remote_code"):
        load(tmp_path)


# --------------------------------------------------------------------------------------------------------------- saving


@pytest.mark.parametrize("failing", ["LayerTransformer", "LayerScaling", "CayleyGNN", "LinearHead", "provenance"])
def test_a_failure_while_saving(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    path = tmp_path / "model"
    old, new = make(), make(seed=1)
    old.save(str(path))
    before = contents(path)

    def save(self: Any, output_path: str, *args: Any, **kwargs: Any) -> None:
        (Path(output_path) / "half.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    if failing == "provenance":
        new.provenance["seed"] = object()
    else:
        monkeypatch.setattr(getattr(ilse_embed, failing), "save", save)
    for target in (path, tmp_path / "not yet"):
        with pytest.raises(TypeError if failing == "provenance" else OSError):
            new.save(str(target))
    monkeypatch.undo()
    assert contents(path) == before and equal(load(path), old)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]  # no temporary folder is left


def save_and_die(model: IlseSentenceTransformer, path: Path, at: int) -> None:
    """In a process of its own: save, and be killed before one of the changes to the folders."""
    calls: list[str] = []

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir"):
            if len(calls) == at:
                os.kill(os.getpid(), signal.SIGKILL)
            calls.append(event)

    sys.addaudithook(count)
    model.save(str(path))


@pytest.mark.parametrize("over", [False, True])
def test_killed_while_saving(make: Make, tmp_path: Path, over: bool) -> None:
    """At no moment does a mixture of two models load, and the next save leaves nothing of the killed one."""
    models = {"old": make(seed=1, encoder="set"), "new": make(save_backbone=True)}
    after = make(seed=2, head=False, scaled=False)
    embeddings = {name: embed(model) for name, model in models.items()}
    models["old"].save(str(tmp_path / "old"))
    after.save(str(tmp_path / "after"))
    wanted = contents(tmp_path / "after")
    seen = []
    for at in range(80):
        path = tmp_path / str(at)
        if over:
            shutil.copytree(tmp_path / "old", path)
        child = multiprocessing.get_context("fork").Process(target=save_and_die, args=(models["new"], path, at))
        child.start()
        child.join(60)
        try:
            found = embed(load(path))
        except FileNotFoundError as error:
            assert "holds no saved model" in str(error) or "there is no folder" in str(error)
            seen.append("none")
        else:
            seen.append(next(name for name, embedding in embeddings.items() if np.array_equal(found, embedding)))
        after.save(str(path))
        assert contents(path) == wanted and len(list(path.iterdir())) == len(list((tmp_path / "after").iterdir()))
        if child.exitcode == 0:
            break
        assert child.exitcode == -signal.SIGKILL
    assert seen[-1] == "new" and len(seen) > 20 and set(seen) == {"none", "new", *(["old"] if over else [])}


FOREIGN = {
    "a card": ("README.md", "holds README.md, which saving would overwrite and ilse_embed did not write; allowed are"),
    "a model": ("modules.json", "holds modules.json, which saving would overwrite"),
    "another library's model": ("config_sentence_transformers.json", "Take another one or move them away"),
    "a folder": ("2_CayleyGNN/notes.txt", "holds 2_CayleyGNN, which"),
    "a file with our name": ("ilse.json", "holds ilse.json, which"),
}


@pytest.mark.parametrize("hub", [False, True])
@pytest.mark.parametrize("which", FOREIGN)
def test_what_others_wrote_is_not_overwritten(make: Make, tmp_path: Path, which: str, hub: bool) -> None:
    name, message = FOREIGN[which]
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text('["mine"]')
    (tmp_path / "data.safetensors").write_text("mine too")
    before = contents(tmp_path)
    model = make(save_backbone=hub)
    with pytest.raises(ValueError, match=message):
        export_hub(model, tmp_path) if hub else model.save(str(tmp_path))
    assert contents(tmp_path) == before and len(list(tmp_path.iterdir())) == 2


def test_a_card_that_another_wrote_later(make: Make, tmp_path: Path) -> None:
    model = make()
    model.save(str(tmp_path), create_model_card=False)
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(ValueError, match=r"holds README.md, which saving would overwrite"):
        model.save(str(tmp_path))
    model.save(str(tmp_path), create_model_card=False)
    assert equal(load(tmp_path), model) and (tmp_path / "README.md").read_text() == "mine"


def test_saving_over_another_model(make: Make, tmp_path: Path) -> None:
    """All that the other save wrote goes, and nothing else; whatever a record names, nothing outside the folder."""
    path = tmp_path / "model"
    export_hub(make(save_backbone=True), path)
    mine = {
        "notes.txt": b"mine",
        "2024_figures/1.png": b"mine",
        "data.safetensors": b"mine",
        "1_Old/config.json": b"{}",
    }
    for name, content in mine.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(content)
    (tmp_path / "beside.txt").touch()
    record = json.loads((path / "ilse.json").read_text())
    (path / "ilse.json").write_text(json.dumps(record | {"files": [*record["files"], "../beside.txt", "..", ""]}))
    new = make(encoder="set", head=False, scaled=False, seed=2)
    new.provenance = {}
    new.save(str(path))
    assert equal(load(path), new) and load(path).provenance == {}
    new.save(str(tmp_path / "alone"))
    alone = contents(tmp_path / "alone")
    assert contents(path) == alone | mine and (tmp_path / "beside.txt").exists()
    (path / "modules.json").write_text("{damaged")
    new.save(str(path))
    assert equal(load(path), new)


@pytest.mark.parametrize("form", [".", "..", "a/../b", "link"])
def test_saving_into_an_empty_folder(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    here = tmp_path / "here" / "there"
    (here / "a").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (here / "link").symlink_to(tmp_path / "elsewhere")
    monkeypatch.chdir(here)
    model = make()
    model.save(form)
    assert equal(load(Path(form).resolve()), model)


def test_saving_a_relative_path(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = make()
    model.save("m")
    model.save("deep/er/m", create_model_card=False)
    assert equal(load("m"), load("deep/er/m")) and not Path("deep/er/m/README.md").exists()


# ---------------------------------------------------------------------------------------------------------- predictions


def test_predict(make: Make, tmp_path: Path) -> None:
    model = make()
    head = next(module for module in model if isinstance(module, LinearHead))
    encoder = next(module for module in model if isinstance(module, CayleyGNN))
    scaling = next(module for module in model if isinstance(module, LayerScaling))
    layers = extract(model[0], TEXTS).select(TEXTS)
    with torch.inference_mode():  # the head reads the embedding before it is normalised
        logits = head.linear(encoder.encode_layers(scaling.scale_layers(layers)))
    probabilities = model.predict_proba(TEXTS, batch_size=4)
    assert probabilities.shape == (len(TEXTS), 8) and probabilities.dtype == np.float32
    np.testing.assert_allclose(probabilities, logits.softmax(-1), atol=1e-5)
    np.testing.assert_allclose(probabilities.sum(1), 1, atol=1e-5)
    assert model.predict(TEXTS) == [LABELS[column] for column in logits.argmax(-1)]
    assert len(set(model.predict(TEXTS))) > 1

    model.save(str(tmp_path))
    again = load(tmp_path)
    assert again.labels == model.labels == LABELS
    assert np.array_equal(again.predict_proba(TEXTS, batch_size=4), probabilities)
    for texts in (tuple(TEXTS), np.array(list(SENTENCES)), iter(TEXTS[:0])):
        assert list(again.predict(texts)) == model.predict(list(texts))


def test_predict_of_no_texts(make: Make) -> None:
    model = make()
    assert model.predict([]) == [] and model.predict(()) == []
    assert model.predict_proba([]).shape == (0, 8) and model.predict_proba([]).dtype == np.float32


@pytest.mark.parametrize("method", ["predict", "predict_proba"])
def test_wrong_predictions(make: Make, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    with pytest.raises(ValueError, match=r"takes a list of texts; got one string, wrap it: \[text\]"):
        getattr(make(), method)("a text")
    headless = make(head=False)
    monkeypatch.setattr(LayerTransformer, "forward", lambda *a, **k: pytest.fail("ran the backbone first"))
    for texts in ([], ["a text"]):
        with pytest.raises(ValueError, match=r"no linear head .*not trained on a classification task"):
            getattr(headless, method)(texts)
    with pytest.raises(ValueError, match="no linear head"):
        headless.labels  # noqa: B018


# --------------------------------------------------------------------------------------------------------------- encode


def test_the_head_leaves_the_embedding_alone(make: Make) -> None:
    model = make()
    assert equal(model, build(*list(model)[:1], model[2], model[1]))
    assert model.get_embedding_dimension() == 24


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({}, (0, 24)),
        ({"convert_to_tensor": True}, (0, 24)),
        ({"truncate_dim": 8}, (0, 8)),
        ({"truncate_dim": 99}, (0, 24)),
        ({"truncate_dim": 8, "convert_to_tensor": True, "normalize_embeddings": True}, (0, 8)),
    ],
    ids=str,
)
@pytest.mark.parametrize("empty", [[], (), np.array([], dtype=str)], ids=["list", "tuple", "array"])
def test_encode_nothing(make: Make, options: dict[str, Any], shape: tuple[int, int], empty: Any) -> None:
    model = make()
    found = model.encode(empty, **options)
    some = model.encode(["a text"], **options)
    assert found.shape == shape and type(found) is type(some) and found.dtype == some.dtype
    assert found.shape[1] == some.shape[1]
    model.truncate_dim = 5
    assert model.encode(empty).shape == (0, 5)
    assert model.encode([], output_value=None) == [] and model.encode([], convert_to_numpy=False) == []


def test_encode_one_string(make: Make) -> None:
    model = make()
    one = model.encode("a text")
    assert one.shape == (24,) and np.allclose(one, model.encode(["a text"])[0], atol=1e-6)
    assert np.array_equal(model.encode(sentences=["a text"]), model.encode(inputs=["a text"]))
    assert model.encode("a text", output_value=None)["layer_embeddings"].shape == (4, 32)


def test_encode_in_any_order_and_batch(make: Make) -> None:
    model = make()
    before = embed(model)
    np.testing.assert_allclose(model.encode(TEXTS[::-1], batch_size=3)[::-1], before, atol=1e-5)
    np.testing.assert_allclose([model.encode(text) for text in TEXTS], before, atol=1e-5)


def test_prompts(make: Make, tmp_path: Path) -> None:
    model = make()
    model.prompts |= {"query": "Query: ", "sts": "Compare "}
    plain, asked = embed(model), model.encode(TEXTS, prompt_name="query")
    np.testing.assert_allclose(asked, model.encode([f"Query: {text}" for text in TEXTS]), atol=1e-5)
    assert np.abs(asked - plain).max() > 0.01
    np.testing.assert_allclose(model.encode_query(TEXTS), asked, atol=1e-6)
    model.set_pooling_include_prompt(False)
    outside = model.encode(TEXTS, prompt_name="query")
    assert np.abs(outside - asked).max() > 0.01 and np.abs(outside - plain).max() > 1e-4
    assert equal(model, make())  # without a prompt nothing changes
    model.default_prompt_name = "sts"
    model.save(str(tmp_path))
    again = load(tmp_path)
    assert again.prompts["query"] == "Query: " and again.default_prompt_name == "sts"
    assert again[0].include_prompt is False
    assert np.array_equal(again.encode(TEXTS, prompt_name="query"), outside)
    assert np.array_equal(again.encode(TEXTS), again.encode(TEXTS, prompt="Compare "))


def test_truncated_and_quantised(make: Make, tmp_path: Path) -> None:
    model = make()
    full = embed(model)
    np.testing.assert_allclose(model.encode(TEXTS, truncate_dim=6), full[:, :6], atol=1e-6)
    short = model.encode(TEXTS, truncate_dim=6, normalize_embeddings=True)
    np.testing.assert_allclose(short, full[:, :6] / np.linalg.norm(full[:, :6], axis=1, keepdims=True), atol=1e-5)
    model.truncate_dim = 6
    model.save(str(tmp_path))
    assert load(tmp_path).get_embedding_dimension() == 6
    assert np.array_equal(load(tmp_path).encode(TEXTS), model.encode(TEXTS))
    assert load(tmp_path, truncate_dim=3).encode(TEXTS).shape == (len(TEXTS), 3)
    model.truncate_dim = None
    for precision, dtype, width in (("int8", np.int8, 24), ("uint8", np.uint8, 24), ("ubinary", np.uint8, 3)):
        small = model.encode(TEXTS, precision=precision)
        assert small.dtype == dtype and small.shape == (len(TEXTS), width)
    assert np.array_equal(np.unpackbits(small, axis=1).astype(bool), full > 0)
    small = model.encode(TEXTS, precision="int8")
    for column in range(24):  # each dimension has a range of its own
        assert np.corrcoef(small[:, column].astype(np.float64), full[:, column])[0, 1] > 0.99


@pytest.mark.parametrize("how", ["loaded", "to", "half"])
def test_the_head_stays_float32(make: Make, tmp_path: Path, how: str) -> None:
    reference = make()
    if how == "loaded":
        reference.save(str(tmp_path))
        model = load(tmp_path, model_kwargs={"dtype": torch.bfloat16})
    else:
        model = make().to(torch.bfloat16) if how == "to" else make().half()
    assert model[0].model.dtype == (torch.float16 if how == "half" else torch.bfloat16)
    for one, other in zip(list(model)[1:], list(reference)[1:], strict=True):
        assert all(tensor.dtype == torch.float32 for tensor in one.state_dict().values())
        assert all(
            torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True)
        )
    found = model.encode(list(SENTENCES))
    assert found.dtype == np.float32 and not np.array_equal(found, reference.encode(list(SENTENCES)))
    assert ((found * reference.encode(list(SENTENCES))).sum(1) > 0.98).all()


def test_gradients_reach_the_head_alone(make: Make) -> None:
    model = make()
    model(model.preprocess(list(SENTENCES)))["sentence_embedding"].sum().backward()
    trained = {name for name, tensor in model.named_parameters() if tensor.requires_grad}
    assert trained and all(name.split(".")[0] in ("encoder", "head") for name in trained)
    assert all(tensor.grad is None for tensor in model[0].parameters())


# ----------------------------------------------------------------------------------------------------------------- card


@pytest.mark.parametrize("hub", [False, True])
@pytest.mark.parametrize("provenance", [PROVENANCE, {}, {"task": None, "recipe": {}}], ids=["full", "none", "partial"])
def test_the_card(make: Make, tmp_path: Path, hub: bool, provenance: dict[str, Any]) -> None:
    model = make()
    model.provenance = provenance
    if hub:
        model[0].backbone, model[0].backbone_revision = "HuggingFaceTB/SmolLM2-135M", "abc123"
    model.save(str(tmp_path))
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    start, front, text = card.split("---\n", 2)
    facts = yaml.safe_load(front)
    assert start == "" and facts["library_name"] == "sentence-transformers"
    assert facts["pipeline_tag"] == "sentence-similarity" and "ilse-embed" in facts["tags"]
    assert facts.get("base_model") == ("HuggingFaceTB/SmolLM2-135M" if hub else None)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    for part in (
        "`HuggingFaceTB/SmolLM2-135M`" if hub else f"`{Path(model[0].backbone).name}`",
        "abc123" if hub else "None",
        "`mean`",
        "CayleyGNN",
        "4 layers (width 32)",
        "width 24",
        f"{trained:,}",
        "ilse_embed.load(",
        "trust_remote_code=True",
        "licence of the",
    ):
        assert part in " ".join(text.split()), part
    assert hub or str(Path(model[0].backbone).parent) not in card
    if provenance is PROVENANCE:
        assert all(part in text for part in ("toy-ü", "default,epochs=3", "71.25"))
    code = text.split("```python\n")[1].split("```")[0].replace("PATH_OR_NAME", str(tmp_path))
    if not hub:
        names: dict[str, Any] = {}
        exec(code, names)
        assert names["embeddings"].shape == (2, 24)
