"""A real Ray on this machine: two actors, one of them killed in the middle, every text exactly once."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyarrow import parquet

from ilse_embed import build, build_encoder, extraction, load
from ilse_embed.bulk import BulkJob, embed_files
from ilse_embed.distributed import Cluster, embed_files_on, fill_on
from ilse_embed.extraction import BackboneSource, fill
from ilse_embed.store import FeatureStore
from ilse_embed.tables import TextFile

ray: Any = pytest.importorskip("ray")

TEXTS = [f"Text number {number}{' and so on' * (number % 5)}." for number in range(120)]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Two cores, whatever the machine has; shared by the tests of this file."""
    here = {"env_vars": {"PYTHONPATH": str(Path(__file__).parent)}}  # so that workers find this file
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error", runtime_env=here)
    yield
    ray.shutdown()


class Killed:
    """A callable of which the first actor that comes to an item is killed there, once."""

    def __init__(self, make: Callable[[], Callable[[Any], Any]], folder: Path, number: int) -> None:
        self.make, self.folder, self.number = make, folder, number

    def __call__(self) -> Callable[[Any], Any]:
        call = self.make()
        (self.folder / f"actor-{os.getpid()}").touch()

        def wrapped(item: dict[str, Any]) -> Any:
            if item["number"] == self.number and not (self.folder / "killed").exists():
                (self.folder / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return call(item)

        return wrapped


class KillingCluster(Cluster):
    """A cluster that loses one actor at an item."""

    folder: Path

    def map(self, make: Callable[[], Callable[[Any], Any]], items: Any) -> Iterator[Any]:
        items = list(items)
        middle = items[len(items) // 2]["number"] if items else -1
        return super().map(Killed(make, self.folder, middle), items)


@pytest.fixture
def killing(tmp_path: Path) -> KillingCluster:
    two = KillingCluster(workers=2)
    folder = tmp_path / "actors"
    folder.mkdir()
    object.__setattr__(two, "folder", folder)
    return two


def test_embedding(tiny_backbone: Callable[..., Path], killing: KillingCluster, tmp_path: Path) -> None:
    backbone = BackboneSource(str(tiny_backbone())).load()
    folder = tmp_path / "model"
    build(backbone, build_encoder("cayley", backbone.num_layers, 32, hidden=12)).save(str(folder))
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    task = BulkJob((TextFile(file),), tmp_path / "out", chunk_texts=6)
    model = load(folder)
    task.claim(model)
    told: list[tuple[int, int]] = []
    result = embed_files_on(killing, task, str(folder), dtype=torch.float32, progress=lambda *done: told.append(done))
    assert (tmp_path / "actors/killed").exists()
    assert len(list((tmp_path / "actors").glob("actor-*"))) == 3  # two, and one for the one that was lost
    assert (result.texts, result.parts) == (120, 20) and told[-1][0] == 120
    parts = [parquet.read_table(part).to_pylist() for part in sorted((tmp_path / "out").glob("*.parquet"))]
    found = [row for part in parts for row in part]
    assert [(row["row"], row["text"]) for row in found] == list(enumerate(TEXTS))
    np.testing.assert_allclose([row["embedding"] for row in found], model.encode(TEXTS), atol=1e-6)
    assert embed_files(task, model).embedded == 0  # the local engine finds all of it done
    assert embed_files_on(killing, task, str(folder), dtype=torch.float32).embedded == 0
    (tmp_path / "out/part-000003.parquet").unlink()
    with pytest.raises(ChildProcessError, match=r"(?s)a worker failed: .*of a run with other settings \(model\)"):
        embed_files_on(Cluster(), task, str(folder), dtype=torch.bfloat16)


@pytest.mark.parametrize("compress", [None, 5])
def test_extraction(
    tiny_backbone: Callable[..., Path],
    killing: KillingCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    compress: int | None,
) -> None:
    monkeypatch.setattr(extraction, "SHARD_TEXTS", 6)
    source = BackboneSource(str(tiny_backbone()), pooling="mean", max_seq_length=40)
    backbone = source.load()
    store = FeatureStore.for_backbone(tmp_path / "ray", backbone, dtype="bfloat16", compress=compress)
    told: list[tuple[int, ...]] = []
    fill_on(killing, source, store, backbone, [*TEXTS, *TEXTS[:9]], progress=lambda *done: told.append(done))
    assert (tmp_path / "actors/killed").exists() and told[-1][:2] == (120, 120)
    alone = FeatureStore.for_backbone(tmp_path / "alone", backbone, dtype="bfloat16", compress=compress)
    fill(alone, backbone, TEXTS)
    names = [sorted(path.name for path in one.folder.iterdir()) for one in (store, alone)]
    assert names[0] == names[1] and len(names[0]) == 21 + (compress is not None)  # the very same bytes
    assert torch.equal(store.table(TEXTS).layers, alone.table(TEXTS).layers)
    fill_on(killing, source, store, backbone, TEXTS)  # nothing to do
    assert len(store) == 120


def test_a_worker_that_fails(tiny_backbone: Callable[..., Path], tmp_path: Path) -> None:
    """Its message arrives; the run does not hang."""

    def make() -> Callable[[Any], Any]:
        return lambda item: 1 / item["number"]

    with pytest.raises(ChildProcessError, match=r"(?s)a worker failed: .*division by zero"):
        list(Cluster().map(make, [{"number": 0}]))


def test_no_work_starts_no_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray.data, "from_items", lambda *a, **k: pytest.fail("started"))
    assert list(Cluster().map(lambda: pytest.fail("made"), [])) == []
