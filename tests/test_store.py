"""Layer features: as if each text were encoded alone, kept on disk, found again, never damaged in silence."""

import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import SENTENCES
from safetensors.torch import save_file

from ilse_embed import LayerScaling, LayerTransformer, extraction
from ilse_embed.batches import batches_of, token_lengths
from ilse_embed.extraction import Plan, extract, fill
from ilse_embed.features import CachedLayers, LayerTable, fit_scaling
from ilse_embed.store import FeatureStore, _key

HOSTILE = (
    "",
    " ",
    "\n\t\n",
    "a\x00b",
    "<|endoftext|> </s> [SEP] <pad>",
    "عربي ‏mixed‎ עברית",
    "👩‍👩‍👧‍👦 e\u0301 \u200b\ufeff",
    "cut off \ud83d",
    "cut off \ufffd",
    "x" * 600,
    "word " * 700,
)
TEXTS = (*HOSTILE, *SENTENCES, *(f"Text number {i}{' and so on' * (i % 5)}." for i in range(20)))


@pytest.fixture
def backbone(tiny_backbone: Callable[..., Path]) -> LayerTransformer:
    return LayerTransformer(str(tiny_backbone()), max_seq_length=96, on_truncate="ignore")


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extraction, "SHARD_TEXTS", 8)


def alone(backbone: LayerTransformer, texts: Any) -> torch.Tensor:
    with torch.inference_mode():
        return torch.stack([backbone(backbone.preprocess([text]))["layer_embeddings"][0] for text in texts])


class Counter:
    """Counts the texts that go through a backbone, and the padded tokens of each batch."""

    def __init__(self, backbone: LayerTransformer) -> None:
        self.texts, self.tokens = 0, []
        backbone.register_forward_pre_hook(self)

    def __call__(self, module: Any, args: tuple[Any, ...]) -> None:
        self.texts += len(args[0]["input_ids"])
        self.tokens.append((args[0]["input_ids"].numel(), len(args[0]["input_ids"])))


def shards(store: FeatureStore) -> list[Path]:
    return sorted(store.folder.glob("*.safetensors"))


# ----------------------------------------------------------------------------------------------------------- extraction


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize(
    ("name", "budget"), [("llama", 1), ("llama", 2048), ("qwen3", 100), ("gpt2", 300), ("bert", 300)]
)
def test_as_if_each_text_were_alone(
    tiny_backbone: Callable[..., Path], tmp_path: Path, small_shards: None, name: str, budget: int, stored: bool
) -> None:
    backbone = LayerTransformer(str(tiny_backbone(name)), max_seq_length=96, on_truncate="ignore")
    reference = alone(backbone, TEXTS)
    count, told = Counter(backbone), []
    store = FeatureStore.for_backbone(tmp_path, backbone) if stored else None
    texts = [*TEXTS, *TEXTS[::-1]]
    table = extract(backbone, iter(texts), store, batch_tokens=budget, progress=lambda *done: told.append(done))
    assert table.layers.shape == (len(TEXTS), 4, 32) and table.layers.dtype == torch.float32
    assert not table.layers.is_inference()  # training writes gradients through them
    torch.testing.assert_close(table.select(TEXTS), reference, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        table.select(texts[::-1]), torch.cat([reference, reference.flip(0)]), atol=1e-5, rtol=1e-5
    )
    assert count.texts == len(TEXTS)  # each distinct text once
    assert all(tokens <= budget or texts == 1 for tokens, texts in count.tokens)
    assert told[-1][:2] == (len(TEXTS), len(TEXTS)) and told == sorted(set(told))


@pytest.mark.parametrize("budget", [1, 7, 50, 96, 400, 10**6])
def test_batches_fill_the_budget(backbone: LayerTransformer, budget: int) -> None:
    batches = batches_of(token_lengths(backbone, TEXTS), budget)
    assert sorted(row for batch in batches for row in batch) == list(range(len(TEXTS)))
    sizes = [backbone.preprocess([TEXTS[row] for row in batch])["input_ids"].shape for batch in batches]
    assert all(rows * width <= budget or rows == 1 for rows, width in sizes)
    widths = [width for _, width in sizes]
    assert widths == sorted(widths, reverse=True)
    for (rows, width), following in zip(sizes, batches[1:], strict=False):  # none is closed too early
        assert (rows + 1) * width > budget and following
    assert batches_of(token_lengths(backbone, []), budget) == []


def test_no_texts(backbone: LayerTransformer, tmp_path: Path) -> None:
    count = Counter(backbone)
    for store in (None, FeatureStore.for_backbone(tmp_path, backbone)):
        table = extract(backbone, [], store, progress=lambda *done: pytest.fail("nothing to do"))
        assert table.rows == {} and table.layers.shape == (0, 4, 32)
        assert table.select([]).shape == (0, 4, 32)
    assert count.texts == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("stored", [False, True])
def test_a_layer_that_is_not_finite(
    backbone: LayerTransformer, tmp_path: Path, small_shards: None, value: float, stored: bool
) -> None:
    """Two sound shards, then a text whose embedding is not a number."""
    texts = [*SENTENCES, *(f"number {i}" for i in range(10)), *(f"The {i}" for i in range(3)), "a poisoned Ω"]
    token = backbone.tokenizer("Ω", add_special_tokens=False)["input_ids"][-1]
    with torch.no_grad():
        backbone.model.get_input_embeddings().weight[token, 3] = value
    store = FeatureStore.for_backbone(tmp_path, backbone) if stored else None
    with pytest.raises(FloatingPointError) as error:
        extract(backbone, texts, store)
    for part in ("layer 0", backbone.backbone, "'a poisoned Ω'", "bfloat16 or float32"):
        assert part in str(error.value)
    if store is not None:
        again = FeatureStore.for_backbone(tmp_path, backbone)
        assert [text in again for text in texts] == [True] * 16 + [False] * 4
        assert len(list(store.folder.iterdir())) == 1 + 2  # store.json, two shards, no temporary file


def test_which_layer_is_not_finite(backbone: LayerTransformer) -> None:
    with torch.no_grad():
        backbone.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(FloatingPointError, match=r"^layer 2 of .*llama0' is not finite for the text 'any text'"):
        extract(backbone, ["any text"])


@pytest.mark.parametrize("look_up", [LayerTable.select, LayerTable.indices, lambda t, x: CachedLayers(t).preprocess(x)])
def test_a_text_that_was_not_extracted(backbone: LayerTransformer, look_up: Callable[..., Any]) -> None:
    table = extract(backbone, ["known"])
    with pytest.raises(KeyError) as error:
        look_up(table, ["known", "un\nknown"])
    assert error.value.args == ("no layer features of the text 'un\\nknown'; extract it first",)


def test_cached_layers(backbone: LayerTransformer, tmp_path: Path) -> None:
    table = extract(backbone, TEXTS)
    cached = CachedLayers(table, backbone)
    features = cached(cached.preprocess([TEXTS[3], TEXTS[0], TEXTS[3]]))
    assert torch.equal(features["layer_embeddings"], table.layers[[3, 0, 3]])
    with pytest.raises(ValueError, match="were extracted with the prompt None; got 'query: '"):
        cached.preprocess(["known"], prompt="query: ")
    assert not cached.state_dict() and not list(cached.parameters())  # neither table nor backbone is in a checkpoint
    cached.save(str(tmp_path))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 100


def test_scaling_counts_each_text_once(backbone: LayerTransformer) -> None:
    table = extract(backbone, TEXTS)
    fitted = fit_scaling(table, [TEXTS[5], *TEXTS[2:9], TEXTS[5]])
    wanted = LayerScaling.fit(table.select(TEXTS[2:9]))
    torch.testing.assert_close(fitted.state_dict(), wanted.state_dict())


# ---------------------------------------------------------------------------------------------------------------- store


def test_a_store_is_found_again_and_appended_to(
    tiny_backbone: Callable[..., Path], backbone: LayerTransformer, tmp_path: Path, small_shards: None
) -> None:
    first = extract(backbone, TEXTS[:20], FeatureStore.for_backbone(tmp_path, backbone))
    again = LayerTransformer(str(tiny_backbone()), max_seq_length=96)
    count = Counter(again)
    store = FeatureStore.for_backbone(tmp_path, again)
    assert len(store) == 20 and len(shards(store)) == 3
    assert torch.equal(extract(again, TEXTS[19::-1], store).select(TEXTS[:20]), first.layers)
    assert count.texts == 0
    both = extract(again, TEXTS, store)
    assert count.texts == len(TEXTS) - 20 == len(store) - 20
    assert torch.equal(both.select(TEXTS[:20]), first.layers)
    torch.testing.assert_close(both.select(TEXTS), alone(backbone, TEXTS), atol=1e-5, rtol=1e-5)
    fresh = FeatureStore.for_backbone(tmp_path, again)
    assert torch.equal(fresh.table(TEXTS).layers, both.layers)
    assert fresh.table([]).layers.shape == (0, 4, 32)
    assert TEXTS[0] in fresh and "other" not in fresh and None not in fresh and 3 not in fresh
    with pytest.raises(KeyError, match=r"no layer features of the text 'other' in .*; extract it first"):
        fresh.table([TEXTS[0], "other"])
    with pytest.raises(KeyError, match="other"):
        both.select(["other"])


def test_two_processes_may_fill_one_store(backbone: LayerTransformer, tmp_path: Path, small_shards: None) -> None:
    one, other = (FeatureStore.for_backbone(tmp_path, backbone) for _ in range(2))
    tables = [extract(backbone, TEXTS[:12], one), extract(backbone, TEXTS[6:], other)]
    both = one.refresh().table(TEXTS)
    torch.testing.assert_close(both.select(TEXTS[:12]), tables[0].layers, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(both.select(TEXTS[6:]), tables[1].layers, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({}, True),
        ({"on_truncate": "error"}, True),
        ({"pooling": "mean_without_first"}, False),
        ({"max_seq_length": 95}, False),
        ({"seed": 1}, False),
        ({"name": "qwen3"}, False),
        ({"model_kwargs": {"dtype": torch.bfloat16}}, False),
    ],
    ids=str,
)
def test_what_makes_another_store(
    tiny_backbone: Callable[..., Path], tmp_path: Path, change: dict[str, Any], same: bool
) -> None:
    change = dict(change)
    other_folder = tiny_backbone(change.pop("name", "llama"), seed=change.pop("seed", 0))
    folders = [tmp_path / place / "model" for place in ("one", "other")]  # of one name
    for source, folder in zip((tiny_backbone(), other_folder), folders, strict=True):
        shutil.copytree(source, folder)
    usual = LayerTransformer(str(folders[0]), pooling="mean", max_seq_length=96)
    other = LayerTransformer(str(folders[1]), **({"pooling": "mean", "max_seq_length": 96} | change))
    stores = [FeatureStore.for_backbone(tmp_path, module) for module in (usual, other)]
    assert (stores[0].folder == stores[1].folder) == same
    stores[0].add(["a text"], torch.zeros(1, 4, 32))
    assert ("a text" in stores[1].refresh()) == same
    facts = json.loads((stores[1].folder / "store.json").read_text())
    assert facts["pooling"] == other.pooling and facts["max_seq_length"] == other.max_seq_length


@pytest.mark.parametrize("shape", [(1, 4, 32), (3, 4, 32), (2, 3, 32), (2, 4, 16), (2, 4), (2, 4, 32, 1)])
def test_features_of_another_shape_are_not_added(backbone: LayerTransformer, tmp_path: Path, shape: tuple) -> None:
    store = FeatureStore.for_backbone(tmp_path, backbone)
    with pytest.raises(ValueError, match=r"2 texts need features of shape \(2, 4, 32\) and torch.float32; got"):
        store.add(["a", "b"], torch.zeros(shape))
    assert not shards(store) and len(store) == 0


@pytest.mark.parametrize(("dtype", "digits"), [("float32", 0), ("bfloat16", 2**-8), ("float16", 2**-11)])
def test_dtypes(backbone: LayerTransformer, tmp_path: Path, dtype: str, digits: float) -> None:
    exact = extract(backbone, TEXTS).layers
    store = FeatureStore.for_backbone(tmp_path, backbone, dtype=dtype)
    stored = extract(backbone, TEXTS, store).layers
    assert stored.dtype == torch.float32
    assert ((stored - exact).abs() <= digits * exact.abs() + 1e-6).all()
    (shard,) = shards(store)
    needed = exact.nbytes // (1 if dtype == "float32" else 2)
    assert needed < shard.stat().st_size < needed + 200 * len(TEXTS)
    assert abs(store.bytes_for(len(TEXTS)) - shard.stat().st_size) < 300
    assert torch.equal(FeatureStore.open(store.folder)[TEXTS[3]], stored[3])


def test_what_float16_cannot_hold(tiny_backbone: Callable[..., Path], tmp_path: Path) -> None:
    backbone = LayerTransformer(str(tiny_backbone()))
    backbone.model.get_input_embeddings().weight.data *= 1e8
    with pytest.raises(
        FloatingPointError, match=r"layer 0 of .*'any text'; extract with a store in bfloat16 or float32"
    ):
        extract(backbone, ["any text"], FeatureStore.for_backbone(tmp_path, backbone, dtype="float16"))
    assert extract(backbone, ["any text"], FeatureStore.for_backbone(tmp_path, backbone, dtype="bfloat16"))


@pytest.mark.parametrize("include_prompt", [True, False])
def test_a_prompt(tiny_backbone: Callable[..., Path], tmp_path: Path, include_prompt: bool) -> None:
    backbone = LayerTransformer(str(tiny_backbone()), include_prompt=include_prompt)
    store = FeatureStore.for_backbone(tmp_path, backbone, prompt="query: ")
    with torch.inference_mode():
        expected = backbone(backbone.preprocess(list(SENTENCES), prompt="query: "))["layer_embeddings"]
    table = extract(backbone, SENTENCES, store)
    torch.testing.assert_close(table.select(SENTENCES), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(extract(backbone, SENTENCES, prompt="query: ").layers, table.layers)
    assert CachedLayers(table).preprocess([SENTENCES[1]], prompt="query: ")["input_ids"].tolist() == [[1]]
    with pytest.raises(ValueError, match=r"prompt is 'other'; the store .* is for 'query: '"):
        extract(backbone, SENTENCES, store, prompt="other")
    assert len(FeatureStore.for_backbone(tmp_path, backbone)) == 0  # without a prompt is another store


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "int8"}, "dtype is 'int8'; allowed are"),
        ({"compress": 0}, "compress is 0; allowed are widths from 1 to the backbone's, 32"),
        ({"compress": 33}, "compress is 33"),
    ],
)
def test_wrong_options(backbone: LayerTransformer, tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        FeatureStore.for_backbone(tmp_path, backbone, **options)
    assert not list(tmp_path.iterdir())


def test_compressed(backbone: LayerTransformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fitted on the first texts, those included; appended to with the same directions; the same again after a crash."""
    monkeypatch.setattr(extraction, "SHARD_TEXTS", 8)
    store = FeatureStore.for_backbone(tmp_path / "one", backbone, compress=5)
    count = Counter(backbone)
    first = extract(backbone, TEXTS[:20], store)
    assert count.texts == 20  # the sample is not run again
    assert first.layers.shape == (20, 4, 5) and first.basis is not None
    raw = extract(backbone, TEXTS)
    torch.testing.assert_close(first.layers, first.basis.compress(raw.select(TEXTS[:20])), atol=1e-4, rtol=1e-4)
    again = FeatureStore.for_backbone(tmp_path / "one", backbone, compress=5)
    both = extract(backbone, TEXTS, again)
    torch.testing.assert_close(both.layers, first.basis.compress(raw.layers), atol=1e-4, rtol=1e-4)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    other = FeatureStore.for_backbone(tmp_path / "two", backbone, compress=5)
    with monkeypatch.context() as patch:
        patch.setattr(FeatureStore, "add", lambda *_: full(0))  # the directions are there and no shard
        with pytest.raises(OSError, match="No space"):
            fill(other, backbone, TEXTS[:20])
    fill(FeatureStore.for_backbone(tmp_path / "two", backbone, compress=5), backbone, TEXTS[:20])
    names = [sorted(path.name for path in tmp_path.glob(f"{run}/*/*")) for run in ("one", "two")]
    assert set(names[1]) <= set(names[0])


def test_a_compression_needs_texts(backbone: LayerTransformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extraction, "LEAST_SAMPLE", 21)
    store, count = FeatureStore.for_backbone(tmp_path, backbone, compress=5), Counter(backbone)
    with pytest.raises(ValueError, match=r"needs at least 21; got 20\. Extract the large corpus first"):
        fill(store, backbone, TEXTS[:20])
    assert count.texts == 0 and store.basis is None
    fill(store, backbone, TEXTS[:21])
    fill(store, backbone, TEXTS[21:23])  # appending a few is fine


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"pooling": "mean_without_first"}, "pooling"),
        ({"max_seq_length": 64}, "max_seq_length"),
        ({"seed": 1}, "weights"),
    ],
)
def test_a_store_of_something_else(
    tiny_backbone: Callable[..., Path], backbone: LayerTransformer, tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    store = FeatureStore.for_backbone(tmp_path, backbone)
    change = dict(change)
    folder = str(tiny_backbone(seed=change.pop("seed", 0)))
    other = LayerTransformer(folder, **{"pooling": backbone.pooling, "max_seq_length": 96} | change)
    with pytest.raises(ValueError, match=rf"is for another backbone or other settings \({named}\)"):
        extract(other, TEXTS, store)
    assert len(store) == 0


def test_plan(backbone: LayerTransformer, tmp_path: Path) -> None:
    store = FeatureStore.for_backbone(tmp_path, backbone)
    fill(store, backbone, TEXTS[:10])
    plan = Plan.of(backbone, [*TEXTS, *TEXTS], store)
    assert plan.texts == len(TEXTS) and plan.missing == list(TEXTS[10:])
    assert plan.tokens == backbone.preprocess(list(TEXTS[10:]))["attention_mask"].sum()
    assert plan.bytes == store.bytes_for(len(TEXTS) - 10) and plan.free > 0
    plan.check()
    with pytest.raises(OSError, match=r"the features need 5\.00 GB and the disk has 0\.00 GB left; take another disk"):
        Plan(1, ["x"], 1, 5 * 10**9, 100).check()


# -------------------------------------------------------------------------------------------------------------- crashes


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_extraction(done: int, *_: int) -> None:
    if done > 20:  # in the middle of the third shard
        die()


def run_and_die(backbone: LayerTransformer, root: Path, where: str) -> None:
    """In a process of its own: extract, and be killed."""
    store = FeatureStore.for_backbone(root, backbone)
    if where != "extracting":
        write = {"flushing": "fsync", "renaming": "replace"}[where]
        real, calls = getattr(os, write), []

        def third(*args: Any, **kwargs: Any) -> Any:
            calls.append(args)
            return die() if len(calls) == 3 else real(*args, **kwargs)

        setattr(os, write, third)
    extract(backbone, TEXTS, store, batch_tokens=200, progress=die_in_extraction if where == "extracting" else None)


@pytest.mark.parametrize("where", ["extracting", "flushing", "renaming"])
def test_killed_in_the_middle(backbone: LayerTransformer, tmp_path: Path, small_shards: None, where: str) -> None:
    undisturbed = extract(
        backbone, TEXTS, FeatureStore.for_backbone(tmp_path / "undisturbed", backbone), batch_tokens=200
    )
    child = multiprocessing.get_context("fork").Process(target=run_and_die, args=(backbone, tmp_path / "killed", where))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    store = FeatureStore.for_backbone(tmp_path / "killed", backbone)
    left = [path.name for path in store.folder.iterdir() if path not in shards(store)]
    assert len(left) == (1 if where == "extracting" else 2)  # store.json, and a temporary file
    assert len(store) == 16 and len(shards(store)) == 2
    for stale in (".000002-0123456789abcdef.safetensors.1.tmp", "000002-0123456789abcdef.safetensors.tmp"):
        (store.folder / stale).write_bytes(b"half of a shard")
    count = Counter(backbone)
    store = FeatureStore.for_backbone(tmp_path / "killed", backbone)
    table = extract(backbone, TEXTS, store, batch_tokens=200)
    assert count.texts == len(TEXTS) - 16
    assert table.rows == undisturbed.rows and torch.equal(table.layers, undisturbed.layers)
    names = [[path.name for path in (tmp_path / run).glob("*/*.safetensors")] for run in ("killed", "undisturbed")]
    assert sorted(names[0]) == sorted(names[1])


def test_a_failed_write_leaves_no_temporary_file(
    backbone: LayerTransformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FeatureStore.for_backbone(tmp_path, backbone)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        extract(backbone, ["a text"], store)
    assert [path.name for path in store.folder.iterdir()] == ["store.json"] and "a text" not in store


# --------------------------------------------------------------------------------------------------------------- damage


@pytest.fixture
def filled(backbone: LayerTransformer, tmp_path: Path, small_shards: None) -> FeatureStore:
    store = FeatureStore.for_backbone(tmp_path, backbone)
    extract(backbone, TEXTS[:16], store)
    return store


def serve(root: Path, backbone: LayerTransformer) -> LayerTable:
    return extract(backbone, TEXTS[:16], FeatureStore.for_backbone(root, backbone))


def index_of(store: FeatureStore, keys: Any) -> dict[str, str]:
    return {"index": json.dumps({"store": store._identity(), "keys": keys})}


def flips(size: int) -> Iterator[int]:
    rng = np.random.default_rng(1)
    yield from (0, 7, 8, 9, size - 1)
    yield from rng.integers(8, 900, 25).tolist()  # header, with the texts' hashes
    yield from rng.integers(0, size, 25).tolist()


def test_flipped_bytes_are_never_served(backbone: LayerTransformer, filled: FeatureStore, tmp_path: Path) -> None:
    shard = shards(filled)[1]
    sound = shard.read_bytes()
    for position in flips(len(sound)):
        damaged = bytearray(sound)
        damaged[position] ^= 1 << position % 8
        shard.write_bytes(damaged)
        with pytest.raises(OSError, match="delete it and extract again") as error:
            serve(tmp_path, backbone)
        assert str(shard) in str(error.value), position
        for extra in shards(filled):  # a text whose hash was damaged is computed anew before the damage shows
            if extra.name not in filled.shards:
                extra.unlink()
    shard.write_bytes(sound)
    assert torch.equal(serve(tmp_path, backbone).layers, filled.table(TEXTS[:16]).layers)


def test_every_flipped_byte_is_found(backbone: LayerTransformer, tmp_path: Path, small_shards: None) -> None:
    """In the note, the directions and the shards alike, by name; and none is served."""
    store = FeatureStore.for_backbone(tmp_path, backbone, compress=5)
    fill(store, backbone, TEXTS[:16])
    assert list(FeatureStore.problems(store.folder)) == []
    files = sorted(store.folder.iterdir())
    assert len(files) == 4
    rng = np.random.default_rng(0)
    for number in range(60):
        path = files[number % 4]
        sound = path.read_bytes()
        damaged = bytearray(sound)
        damaged[rng.integers(len(sound))] ^= 1 << rng.integers(8)
        path.write_bytes(damaged)
        assert path in [found for found, _ in FeatureStore.problems(store.folder)], number
        with pytest.raises((OSError, KeyError), match=r"extract again|extract it first"):
            FeatureStore.open(store.folder).table(TEXTS[:16])
        path.write_bytes(sound)


def test_a_few_texts_of_a_large_store_are_read_where_they_are(
    backbone: LayerTransformer, filled: FeatureStore, tmp_path: Path
) -> None:
    store = FeatureStore.open(filled.folder)
    assert torch.equal(store[TEXTS[3]], filled.table(TEXTS[:16]).layers[3])
    assert store._sound == {shards(filled)[0].name}  # the other shard was not touched
    with pytest.raises(KeyError, match="no layer features of the text 'other'"):
        store["other"]


@pytest.mark.parametrize("kept", [0, 1, 8, 100, 700, -1, -4000])
def test_truncated_shard(backbone: LayerTransformer, filled: FeatureStore, tmp_path: Path, kept: int) -> None:
    shard = shards(filled)[0]
    shard.write_bytes(shard.read_bytes()[:kept])
    with pytest.raises(OSError, match="delete it and extract again") as error:
        serve(tmp_path, backbone)
    assert str(shard) in str(error.value)
    shard.unlink()
    count = Counter(backbone)
    serve(tmp_path, backbone)
    assert count.texts == 8  # the advice of the message works


def test_refreshed(filled: FeatureStore) -> None:
    """What others did to the folder since: a shard that is gone is forgotten, a damaged one is looked at again."""
    first, second = shards(filled)
    first.unlink()
    assert [text in filled.refresh() for text in TEXTS[:16]] == [False] * 8 + [True] * 8 and len(filled) == 8
    damaged = bytearray(second.read_bytes())
    damaged[-1] ^= 1
    second.write_bytes(damaged)
    with pytest.raises(OSError, match="not that of its name"):
        filled.refresh().table(TEXTS[8:16])


@pytest.mark.parametrize(
    ("tensors", "metadata"),
    [
        (None, None),
        ({"weight": torch.zeros(2)}, None),
        ({"layers": torch.zeros(2, 4, 32)}, {"format": "pt"}),
        ({"layers": torch.zeros(2, 4, 32)}, {"index": "not json"}),
        ({"layers": torch.zeros(2, 4, 32)}, ["a"]),
        ({"layers": torch.zeros(1, 4, 16)}, ["a"]),
        ({"weight": torch.zeros(1, 4, 32)}, ["a"]),
        ({"layers": torch.zeros(1, 4, 32)}, 3),
        ({"layers": torch.zeros(1, 4, 32)}, {"index": '{"store": "0123456789ab", "keys": ["a"]}'}),
    ],
)
@pytest.mark.parametrize("name", ["model.safetensors", "000009-0123456789abcdef.safetensors"])
def test_foreign_file(
    backbone: LayerTransformer, filled: FeatureStore, tmp_path: Path, name: str, tensors: Any, metadata: Any
) -> None:
    foreign = filled.folder / name
    if tensors is None:
        foreign.write_text("something else")
    else:
        of_ours = isinstance(metadata, list | int)
        save_file(tensors, foreign, index_of(filled, metadata) if of_ours else metadata)
    with pytest.raises(OSError, match="is damaged or none of ours") as error:
        serve(tmp_path, backbone)
    assert str(foreign) in str(error.value)


def test_a_shard_of_the_right_form_under_a_wrong_name(
    backbone: LayerTransformer, filled: FeatureStore, tmp_path: Path
) -> None:
    """Features that somebody else put there under a known text's hash."""
    foreign = filled.folder / "zzz.safetensors"
    save_file({"layers": torch.zeros(1, 4, 32)}, foreign, index_of(filled, [_key(TEXTS[0])]))
    with pytest.raises(OSError, match="not that of its name"):
        serve(tmp_path, backbone)


def test_of_two_that_fit_directions_the_first_one_wins(backbone: LayerTransformer, tmp_path: Path) -> None:
    """Else the shards of one would not fit the directions of the other."""
    raw = extract(backbone, TEXTS).layers
    one, other = (FeatureStore.for_backbone(tmp_path, backbone, compress=5) for _ in range(2))
    first = one.fit_basis(raw[:20])
    exists = Path.exists
    try:
        Path.exists = lambda path, **given: path.name != "basis.safetensors" and exists(path, **given)  # type: ignore
        second = other.fit_basis(raw[20:])
    finally:
        Path.exists = exists  # type: ignore[method-assign]
    assert second.digest == first.digest
    for store, texts in ((one, TEXTS[:5]), (other, TEXTS[5:9])):
        fill(store, backbone, texts)
    assert len(FeatureStore.open(one.folder).table(TEXTS[:9]).layers) == 9
