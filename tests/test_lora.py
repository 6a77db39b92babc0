"""LoRA: it learns, leaves the backbone alone, is saved as adapter and head, goes on after a stop, is nobody else."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from sentence_transformers import SentenceTransformer
from transformers import AutoModel

from ilse_embed import LoraTransformer, build, export_hub, load
from ilse_embed.evaluation import evaluate, model_meta
from ilse_embed.extraction import extract
from ilse_embed.identity import model_revision
from ilse_embed.lora import ADAPTER, LoraOptions, train_lora
from ilse_embed.recipes import Recipe
from ilse_embed.scoring import trained_score
from ilse_embed.store import store_digest
from ilse_embed.tasks import Labelled, Pairs, Task
from ilse_embed.training import TrainedHead

STARTS = ("Where is my", "I cannot find", "Please add money", "Hm,")
THINGS = ("card", "old card", "new card 7", "card, the blue one", "🙂 card", "carte dorée", "invoice", "tomatoes")
TEXTS = [f"{start} {thing} {i}" for i in range(3) for thing in THINGS for start in STARTS]
QUICK = LoraOptions(rank=4, alpha=16, epochs=5, batch_size=8, learning_rate=1e-2)


def task_of(kind: str) -> Task:
    classes = [row % 4 for row in range(len(TEXTS))]
    rows: Any
    if kind == "classification":
        rows = Labelled(TEXTS, [STARTS[number] for number in classes])
    else:
        other = np.random.default_rng(0).permutation(len(TEXTS)).tolist()
        alike = np.array(
            [5.0 * (classes[a] % 3 == classes[b] % 3) for a, b in enumerate(other)]
        )  # "Where" is like "Hm"
        rows = Pairs(TEXTS, [TEXTS[b] for b in other], alike)
    splits = {"train": range(48), "validation": range(48, 64), "test": range(64, 96)}
    named = {split: rows.select(some) for split, some in splits.items()}
    return Task("toy", kind, named, None if kind == "classification" else (0.0, 5.0), "made up")  # type: ignore[arg-type]


Make = Callable[..., LoraTransformer]


@pytest.fixture
def make(tiny_backbone: Callable[..., Path]) -> Make:
    def lora(name: str = "llama", options: LoraOptions = QUICK, **kwargs: Any) -> LoraTransformer:
        return LoraTransformer(str(tiny_backbone(name)), adapter=options.adapter, pooling="mean", **kwargs)

    return lora


def base_weights(backbone: LoraTransformer) -> dict[str, torch.Tensor]:
    named = backbone.model.named_parameters()
    return {name.replace(".base_layer", ""): p.clone() for name, p in named if ".lora_" not in name}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def weights(backbone: LoraTransformer, trained: TrainedHead) -> dict[str, torch.Tensor]:
    head = {} if trained.head is None else trained.head.state_dict()
    return {key: tensor.clone() for key, tensor in (backbone.adapter_tensors() | head).items()}


# ------------------------------------------------------------------------------------------------------------ it learns


@pytest.mark.parametrize("kind", ["classification", "sts"])
def test_it_learns_and_the_backbone_stays(make: Make, kind: str) -> None:
    task, backbone = task_of(kind), make()
    before, told = base_weights(backbone), []
    trained = train_lora(task, backbone, QUICK, progress=lambda *epoch: told.append(epoch))
    assert equal(before, base_weights(backbone))
    assert equal(before, dict(AutoModel.from_pretrained(backbone.backbone).named_parameters()))
    score = trained_score(trained, task, extract(backbone, task.texts("test")), "test")
    fresh = make()
    untrained = TrainedHead(None, trained.encoder, trained.head, 0, 0, 0, 0, {})
    before_training = trained_score(untrained, task, extract(fresh, task.texts("test")), "test")
    # The head alone tells many classes apart, as does the bare cosine; with two gold scores no correlation reaches 87.
    assert score > (90 if kind == "classification" else 80) and score > before_training + 5, (score, before_training)
    assert [done for done, _, _ in told] == list(range(1, trained.epochs + 1))
    assert max(score for _, _, score in told) == pytest.approx(trained.validation)
    assert trained.provenance["encoder"] == "lora" and trained.provenance["lora"]["targets"] == ["q_proj", "v_proj"]
    assert trained.provenance["rows"] == {"train": 48, "validation": 16}
    json.dumps(trained.provenance)


@pytest.mark.parametrize(
    ("name", "targets", "shapes"),
    [
        # hidden 32, 4 heads of 8, 2 for keys and values, MLP 48, 3 blocks
        ("llama", None, [(32, 32), (32, 16)]),
        ("llama", ("down_proj",), [(48, 32)]),
        ("llama", ("all-linear",), [(32, 32), (32, 16), (32, 16), (32, 32), (32, 48), (32, 48), (48, 32)]),
        ("gpt2", None, [(32, 96)]),
        ("bert", None, [(32, 32), (32, 32)]),
        ("phi3", ("qkv_proj",), [(32, 64)]),
        ("mamba", ("x_proj",), [(64, 10)]),
    ],
)
@pytest.mark.parametrize("rank", [1, 8])
def test_parameters_are_those_of_the_formula(
    make: Make, name: str, targets: Any, shapes: list[tuple[int, int]], rank: int
) -> None:
    backbone = make(name, LoraOptions(rank=rank, targets=targets))
    count = sum(parameter.numel() for parameter in backbone.adapter_parameters())
    assert count == 3 * sum(rank * (rows + columns) for rows, columns in shapes)
    assert LoraTransformer(backbone.backbone, adapter=backbone.adapter).adapter == backbone.adapter


def test_trained_parameters_count_the_head(make: Make) -> None:
    options = LoraOptions(rank=2, epochs=1, max_rows=8, targets=("q_proj",))
    trained = train_lora(task_of("classification"), make(options=options), options)
    assert trained.parameters == 3 * 2 * (32 + 32) + (32 * 4 + 4)
    assert trained.provenance["rows"]["train"] == 8


# ------------------------------------------------------------------------------------------------ padding and gradients


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "bloom"])
def test_padding_and_untrained_adapter_change_nothing(make: Make, name: str) -> None:
    from ilse_embed import LayerTransformer

    backbone = make(name)
    assert backbone.tokenizer.pad_token is not None
    texts = ["short", "a text of many more tokens than the other one, so that it is padded"]
    plain = LayerTransformer(backbone.backbone, pooling="mean")
    expected = plain(plain.preprocess(texts))["layer_embeddings"]
    got = backbone(backbone.preprocess(texts))["layer_embeddings"]
    alone = backbone(backbone.preprocess(texts[:1]))["layer_embeddings"]
    assert not expected.requires_grad and got.requires_grad
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(got[:1], alone, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        assert not backbone(backbone.preprocess(texts))["layer_embeddings"].requires_grad


def test_float32_and_dropout(make: Make) -> None:
    backbone = make(model_kwargs={"dtype": torch.bfloat16})
    for changed in (backbone, backbone.half(), backbone.to(torch.bfloat16)):
        assert {p.dtype for p in changed.adapter_parameters()} == {torch.float32}
    assert backbone.model.dtype == torch.bfloat16
    backbone.train()
    on = {name for name, module in backbone.model.named_modules() if module.training}
    assert on and all(".lora_dropout" in name for name in on)
    backbone.eval()
    assert not any(module.training for module in backbone.model.modules())


# ------------------------------------------------------------------------------------------------- saving, identity


def test_saved_as_adapter_and_head(make: Make, tmp_path: Path) -> None:
    task, models = task_of("classification"), []
    for seed in (0, 1):
        backbone = make()
        trained = train_lora(task, backbone, replace(QUICK, epochs=1), seed=seed, prompt="q: ")
        models.append(build(backbone, **trained.parts))
    model = models[0]
    folder = tmp_path / "saved"
    model.save(str(folder))
    sizes = {path.name: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    assert ADAPTER in sizes and sum(sizes.values()) < 60_000 < sum(p.nbytes for p in model[0].model.parameters())
    assert "LoRA adapter of rank 4" in (folder / "README.md").read_text(encoding="utf-8")
    texts = task.splits["test"].texts  # type: ignore[union-attr]
    expected = model.encode(texts)
    for again in (load(folder), SentenceTransformer(str(folder), trust_remote_code=True)):
        np.testing.assert_allclose(again.encode(texts), expected, atol=1e-6)
        assert model_revision(again) == model_revision(model)
    assert load(folder).predict(texts) == model.predict(texts)

    wrapped = PeftModel.from_pretrained(AutoModel.from_pretrained(model[0].backbone), str(folder)).eval()
    tokens = model[0].preprocess(texts[:2])
    last = wrapped(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]).last_hidden_state
    ours = model[0](tokens)["token_embeddings"]
    torch.testing.assert_close(last, ours)

    metas = [model_meta(one) for one in models]
    assert metas[0].name == metas[1].name and metas[0].name.startswith("ilse/lora-")
    assert len({meta.revision for meta in metas} | {model_revision(build(make(), **trained.parts))}) == 3
    assert metas[0].training_datasets == {"toy"}
    assert metas[0].n_parameters == sum(p.numel() for p in model.parameters())
    assert len({store_digest(one[0]) for one in models}) == 2  # features of one are not served for the other
    for protocol, least in (("probe", 0.2), ("full-probe", 0.5), ("head", 0.5)):
        assert evaluate(model, [task], protocol=protocol)[0].get_score() > least

    with pytest.raises(ValueError, match="LoraTransformer needs this package"):
        export_hub(model, tmp_path / "hub")
    (folder / ADAPTER).unlink()
    with pytest.raises(FileNotFoundError, match=ADAPTER):
        load(folder)


def test_wrong_adapter_is_refused(make: Make, tmp_path: Path) -> None:
    make(options=LoraOptions(rank=8)).save(str(tmp_path))
    with pytest.raises(ValueError, match="12 tensors differ"):
        LoraTransformer.load_torch_weights(str(tmp_path), model=make())


# -------------------------------------------------------------------------------------------------------------- resume


def test_stopped_training_goes_on(make: Make, tmp_path: Path) -> None:
    task = task_of("classification")
    options = replace(QUICK, epochs=3, learning_rate=5e-3)

    def run(**kwargs: Any) -> dict[str, torch.Tensor]:
        backbone = make()
        return weights(backbone, train_lora(task, backbone, options, seed=3, **kwargs))

    def stop(done: int, *_: Any) -> None:
        if done == 2:
            raise KeyboardInterrupt

    whole = run()
    with pytest.raises(KeyboardInterrupt):
        run(checkpoints=tmp_path, progress=stop)
    kept = [path for path in tmp_path.rglob("*.safetensors") if path.stat().st_size > 40_000]
    assert kept == [] and list(tmp_path.rglob(ADAPTER))
    assert equal(run(checkpoints=tmp_path), whole)
    assert equal(run(checkpoints=tmp_path), whole)  # ended: nothing is trained again
    with pytest.raises(ValueError, match="lora"):
        train_lora(task, make(), replace(options, epochs=4), seed=3, checkpoints=tmp_path)


# ------------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("llama", {"targets": ("q_proj", "query")}, r"no linear map \['query'\]; it has \['down_proj'"),
        ("phi3", {}, "name the targets: some of"),
    ],
)
def test_wrong_targets(make: Make, name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(name, LoraOptions(**options))


@pytest.mark.parametrize("options", [{"rank": 0}, {"alpha": 0}, {"targets": ()}, {"targets": ("",)}])
def test_wrong_options(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        LoraOptions(**options)


def test_refuses_what_it_cannot_do(make: Make) -> None:
    with pytest.raises(ValueError, match="adapter alone"):
        make(save_backbone=True)
    task = task_of("classification")
    with pytest.raises(ValueError, match="one of each class: 4"):
        train_lora(task, make(options=LoraOptions()), LoraOptions(max_rows=3))
    with pytest.raises(ValueError, match="no validation split"):
        train_lora(Task("toy", "classification", {"train": task.splits["train"]}, None, ""), make())
    for other in ({"rank": 5}, {"alpha": 1}, {"targets": ("q_proj",)}):
        with pytest.raises(ValueError, match=r"'rank': 4, 'alpha': 16.* not"):
            train_lora(task, make(), replace(QUICK, **other))
    assert LoraOptions(dropout=0.1).applied(Recipe(sts_loss="mse")).sts_loss == "mse"
