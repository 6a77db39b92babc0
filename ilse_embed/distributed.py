"""The same callables on a Ray cluster: an adapter, with the model loaded once for each actor.

Every node must see the files that are read and written (a shared disk). Work that a killed actor was at is done again
by another; since a part or a shard is written whole or not at all, and not again where it is there, each text comes out
exactly once.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ilse_embed.bulk import BulkJob, BulkResult, Chunk, ChunkEmbedder
from ilse_embed.extraction import BackboneSource, LayerExtractor, Progress, begin, fit_basis, shards_of
from ilse_embed.model import load
from ilse_embed.store import FeatureStore

if TYPE_CHECKING:
    from ilse_embed.backbone import LayerTransformer


@dataclass(frozen=True)
class Cluster:
    """Where to run.

    Attributes:
        address: Of a running Ray cluster; None takes RAY_ADDRESS, or else starts one on this machine.
        workers: Actors, each with a model of its own; None takes one for each GPU, or without GPUs for each node.
    """

    address: str | None = None
    workers: int | None = None

    def map(self, make: Callable[[], Callable[[Any], Any]], items: Iterable[Mapping[str, Any]]) -> Iterator[Any]:
        """Hand each item to an actor.

        Args:
            make: Makes the callable, once in each actor.
            items: What it is called with; as JSON.

        Yields:
            What it returned, in any order.

        Raises:
            ImportError: If Ray is not installed.
            ChildProcessError: If the callable failed.
        """
        try:
            import ray as library
        except ImportError as error:
            raise ImportError("the engine ray needs an extra: pip install 'ilse-embed[ray]'") from error
        ray: Any = library
        rows = [{"item": json.dumps(item)} for item in items]
        if not rows:
            return
        owner = not ray.is_initialized()
        if owner:
            remote = self.address or os.environ.get("RAY_ADDRESS")
            options: dict[str, Any] = {} if remote else {"include_dashboard": False}
            ray.init(address=remote, log_to_driver=False, logging_level=logging.ERROR, **options)
        try:
            resources = ray.cluster_resources()
            gpus = int(resources.get("GPU", 0))
            cores = [int(node["Resources"].get("CPU", 1)) for node in ray.nodes() if node["Alive"]]
            workers = min(len(rows), self.workers or gpus or len(cores))
            on_a_node = math.ceil(workers / len(cores))
            share = {"num_gpus": min(1, gpus / workers)} if gpus else {"num_cpus": max(1, min(cores) // on_a_node)}
            context = ray.data.DataContext.get_current()
            context.enable_progress_bars = False
            dataset = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
                _Actor,
                fn_constructor_args=(make,),
                batch_size=1,
                compute=ray.data.ActorPoolStrategy(size=workers),
                **share,
            )
            for row in dataset.iter_rows():
                yield json.loads(row["result"])
        except ray.exceptions.RayError as error:
            raise ChildProcessError(f"a worker failed: {error}") from error
        finally:
            if owner:
                ray.shutdown()


class _Actor:
    """The form in which Ray Data takes a callable."""

    def __init__(self, make: Callable[[], Callable[[Any], Any]]) -> None:
        self.call = make()

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        return {"result": [json.dumps(self.call(json.loads(item))) for item in batch["item"]]}


@dataclass(frozen=True)
class _MakeChunkEmbedder:
    job: BulkJob
    model: str
    backbone: str | None
    dtype: torch.dtype
    batch_tokens: int | None

    def __call__(self) -> Callable[[dict[str, Any]], list[int]]:
        model = load(self.model, self.backbone, model_kwargs={"dtype": self.dtype})
        self.job.claim(model)  # or this worker has another model under that name
        do = ChunkEmbedder(self.job, model, self.batch_tokens)

        def call(item: dict[str, Any]) -> list[int]:
            before = do.embed.runner.tokens
            return [item["texts"], do(Chunk(**item)), do.embed.runner.tokens - before]

        return call


def embed_files_on(
    cluster: Cluster,
    job: BulkJob,
    model: str,
    backbone: str | None = None,
    *,
    dtype: torch.dtype,
    batch_tokens: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> BulkResult:
    """`ilse_embed.bulk.embed_files` on a cluster.

    Args:
        cluster: Where to run.
        job: What to do; its folder was claimed.
        model: Folder or hub name of the model.
        backbone: Where its backbone is, if not where the artifact says.
        dtype: Of the backbone, as in the model that the folder was claimed with.
        batch_tokens: Padded tokens in a batch.
        progress: Called after each part with (texts done, tokens done).
    """
    started = time.perf_counter()
    # A worker stands somewhere else, and sees the first row of its chunk but not that of the file.
    files = tuple(replace(file.settled(), path=file.path.absolute()) for file in job.files)
    job = replace(job, files=files, output=job.output.absolute())
    model, backbone = _absolute(model), None if backbone is None else _absolute(backbone)
    chunks = [chunk for chunk, _ in job.chunks()]
    missing = [chunk for chunk in chunks if not job.is_done(chunk)]
    done = sum(chunk.texts for chunk in chunks) - sum(chunk.texts for chunk in missing)
    embedded = tokens = 0
    make = _MakeChunkEmbedder(job, model, backbone, dtype, batch_tokens)
    for texts, new, new_tokens in cluster.map(make, [asdict(chunk) for chunk in missing]):
        done, embedded, tokens = done + texts, embedded + new, tokens + new_tokens
        if progress is not None:
            progress(done, tokens)
    if lost := [chunk.number for chunk in chunks if not job.is_done(chunk)]:
        raise OSError(
            f"{len(lost)} parts are not in {job.output}, though workers made them; all must write to one disk"
        )
    return BulkResult(done, embedded, tokens, len(chunks), time.perf_counter() - started)


def _absolute(name: str) -> str:
    """A folder from the root on; the name of a model on the hub as it is."""
    return str(Path(name).absolute()) if Path(name).exists() else name


@dataclass(frozen=True)
class _MakeShardExtractor:
    source: BackboneSource
    folder: Path
    batch_tokens: int | None

    def __call__(self) -> Callable[[dict[str, Any]], list[int]]:
        backbone = self.source.load()
        options = FeatureStore.open(self.folder).options
        store = FeatureStore.for_backbone(self.folder.parent, backbone, **options)
        if store.folder != self.folder:
            raise ValueError(f"this worker's backbone makes {store.folder.name}, not {self.folder.name}")
        extractor = LayerExtractor(backbone, batch_tokens=self.batch_tokens, prompt=store.facts["prompt"])

        def call(item: dict[str, Any]) -> list[int]:
            before = extractor.runner.tokens
            if any(store.folder.glob(f"{item['number']:06d}-*")):  # of an actor that was killed before it told, perhaps
                store.refresh()
            if not all(text in store for text in item["texts"]):
                store.add(item["texts"], extractor(item["texts"], store), item["number"])
            return [len(item["texts"]), extractor.runner.tokens - before]

        return call


def fill_on(
    cluster: Cluster,
    source: BackboneSource,
    store: FeatureStore,
    backbone: LayerTransformer,
    texts: Iterable[str],
    *,
    batch_tokens: int | None = None,
    progress: Progress | None = None,
) -> None:
    """`ilse_embed.extraction.fill` on a cluster.

    Args:
        cluster: Where to run.
        source: How a worker loads the backbone.
        store: Where to keep the features.
        backbone: The backbone of the store, for a compression that is not fitted yet.
        texts: Any texts.
        batch_tokens: Padded tokens in a batch.
        progress: Called after each shard.
    """
    extractor, missing = begin(store, backbone, texts, batch_tokens)
    left = fit_basis(store, extractor, missing)
    done, tokens = len(missing) - len(left), extractor.runner.tokens
    items = [{"number": n, "texts": list(shard)} for n, shard in enumerate(shards_of(left), store.next_number())]
    dtype = store.facts["model_dtype"]  # a worker with a GPU might take another one by itself
    source = replace(source, name=_absolute(source.name), dtype=dtype)
    make = _MakeShardExtractor(source, store.folder.absolute(), batch_tokens)
    for new, new_tokens in cluster.map(make, items):
        done, tokens = done + new, tokens + new_tokens
        if progress is not None:
            progress(done, len(missing), tokens)
    store.refresh()
    if lost := sum(text not in store for text in missing):
        raise OSError(f"{lost} texts are not in {store.folder}, though workers made them; all must write to one disk")
