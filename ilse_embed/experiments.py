"""One run of a grid: train, score by every protocol, note what made the scores. Killed anywhere, it goes on.

Several processes may work on one grid, on one machine or on a shared disk: each takes the next run that nobody has.
"""

from __future__ import annotations

import hashlib
import json
import re
import resource
import shutil
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from ilse_embed.backbone import LayerTransformer
from ilse_embed.environment import environment
from ilse_embed.evaluation import PROTOCOLS, evaluate, model_meta
from ilse_embed.extraction import BackboneSource, default_device, extract
from ilse_embed.features import CachedLayers, LayerTable
from ilse_embed.files import write_atomically
from ilse_embed.grid import TRANSFER, Results, Run
from ilse_embed.lora import LoraTransformer, train_lora
from ilse_embed.methods import Method, best_layer
from ilse_embed.model import IlseSentenceTransformer, build
from ilse_embed.recipes import Recipe
from ilse_embed.scoring import BATCH_TEXTS, outcomes
from ilse_embed.store import FeatureStore
from ilse_embed.tasks import Task, load_task
from ilse_embed.training import TrainedHead, fingerprint, train

Fitted = tuple[Method, LayerTransformer, LayerTable, TrainedHead]
"""The method with the layer that was chosen, the backbone, features of all texts to score on, what was trained."""


@dataclass
class Laboratory:
    """What runs need: data, features, a place for results and one for work that is not finished.

    Attributes:
        results: Where results go.
        work: Folder of checkpoints and locks; nothing in it is needed once a run is done.
        store: Folder of feature stores.
        data_dir: Mirror of the data; by default the hub.
        places: Folder or hub name of each backbone, where it is not the name itself.
    """

    results: Results
    work: Path
    store: Path
    data_dir: Path | None = None
    places: Mapping[str, str] = field(default_factory=dict)
    _tasks: dict[str, Task] = field(default_factory=dict)
    _features: dict[Any, tuple[LayerTransformer, LayerTable]] = field(default_factory=dict)

    def task(self, name: str) -> Task:
        """A task; loaded once."""
        if name not in self._tasks:
            self._tasks[name] = load_task(name, self.data_dir)
        return self._tasks[name]

    def features(self, run: Run, pooling: str) -> tuple[LayerTransformer, LayerTable]:
        """Backbone, and layer features of all texts that a run reads; those of the last run stay in memory."""
        names = tuple(dict.fromkeys((run.trained_on, *run.tasks)))
        key = (run.backbone, pooling, names)
        if key not in self._features:
            self._features.clear()
            backbone = BackboneSource(self._place(run), pooling).load()
            store = FeatureStore.for_backbone(self.store, backbone)
            texts = dict.fromkeys(text for name in names for text in self.task(name).texts())
            self._features[key] = backbone, extract(backbone, texts, store)
        return self._features[key]

    def _place(self, run: Run) -> str:
        return self.places.get(run.backbone, run.backbone)

    def perform(
        self, runs: Sequence[Run], tell: Callable[[Run, str], None] | None = None
    ) -> tuple[int, dict[Run, Exception]]:
        """Do what is missing and what no other process is at; a run that fails does not keep the others from theirs.

        Args:
            runs: The runs of a grid.
            tell: Called with a run and what happens to it.

        Returns:
            How many runs were done here, and the error of each run that failed; its traceback is in ``work``.
        """
        self.work.mkdir(parents=True, exist_ok=True)
        done, failed = 0, {}
        for run in runs:
            if not self.results.missing(run):
                continue
            with suppress(Timeout), FileLock(self.work / f"{run.id}.lock", timeout=0):
                if not self.results.refresh().missing(run):  # another process was faster
                    continue
                said = tell or (lambda run, what: None)
                said(run, "starts")
                try:
                    note = self._perform(run)
                except Exception as error:
                    failed[run] = error
                    write_atomically(self.work / f"{run.id}.txt", traceback.format_exc().encode())
                    said(run, f"failed: {error}")
                else:
                    done += 1
                    said(run, f"{note['validation']:.2f} on validation, {sum(note['seconds'].values()):.0f} s")
        return done, failed

    def _perform(self, run: Run) -> dict[str, Any]:
        method, checkpoints = Method.parse(run.method), self.work / run.id
        fit = self._adapter if method.trains_backbone else self._head
        with _peak_memory() as peak, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # mteb recommends other versions of tasks
            method, backbone, table, trained = fit(run, method, checkpoints)
            trained_at = time.perf_counter()
            model = build(CachedLayers(table, backbone), **trained.parts).cpu()  # the features are there
            _remember(model, table)
            name = model_name(run)
            where = {"output": self.results.folder, "name": name}
            for protocol in ("probe",) if run.kind == "sts" else PROTOCOLS:
                evaluate(model, run.tasks, self.data_dir, protocol=protocol, **where)  # type: ignore[arg-type]
            if run.kind == "sts":
                others = [other for other in run.tasks if other != TRANSFER]
                if others:
                    evaluate(model, others, self.data_dir, leak_free=True, **where)  # type: ignore[arg-type]
            evaluated_at = time.perf_counter()
        meta = model_meta(model, name)
        note = {
            "run": run.id,
            "backbone": run.backbone,
            "method": run.method,
            "chosen": str(method),
            "recipe": trained.provenance["recipe"],
            "trained_on": run.trained_on,
            "seed": run.seed,
            "model": meta.name,
            "revision": meta.revision,
            "results": run.result_names,
            "validation": round(trained.validation, 4),
            "epochs": trained.epochs,
            "parameters": trained.parameters,
            "backbone_parameters": sum(parameter.numel() for parameter in backbone.parameters()),
            "seconds": {
                "training": round(trained.seconds, 1),
                "evaluation": round(evaluated_at - trained_at, 1),
            },
            "peak_memory_mb": round(peak["mb"]),
            "environment": environment("ilse"),
        }
        self.results.add(note, {name: outcomes(trained, self.task(name), table, "test") for name in run.tasks})
        shutil.rmtree(checkpoints, ignore_errors=True)
        return note

    def _head(self, run: Run, method: Method, checkpoints: Path) -> Fitted:
        """A head on features that are there, or are extracted now."""
        task, recipe = self.task(run.trained_on), method.recipe(run.recipe)
        backbone, table = self.features(run, recipe.pooling)
        if method.asks_for_best:
            method = method.with_layer(self._best_layer(task, table, recipe))
        options: dict[str, Any] = {"seed": run.seed, "encoder_args": method.encoder_args, "checkpoints": checkpoints}
        return method, backbone, table, train(task, table, method.encoder, recipe, **options)

    def _adapter(self, run: Run, method: Method, checkpoints: Path) -> Fitted:
        """An adapter of the backbone, and then features by it."""
        task, recipe, options = self.task(run.trained_on), method.recipe(run.recipe), method.adapter
        backbone = LoraTransformer(self._place(run), pooling=recipe.pooling, adapter=options.adapter)
        backbone.to(default_device())
        trained = train_lora(task, backbone, options, recipe, seed=run.seed, checkpoints=checkpoints)
        splits = ("test",) if run.kind == "sts" else ()  # a probe learns from all others
        texts = (text for name in run.tasks for text in self.task(name).texts(*splits))
        return method, backbone, extract(backbone, texts), trained

    def _best_layer(self, task: Task, table: LayerTable, recipe: Recipe) -> int:
        """Chosen once for features, a task and how the layers are scaled."""
        key = json.dumps([table.source, table.prompt, fingerprint(task), recipe.scaling])
        path = self.work / f"best-layer-{hashlib.sha256(key.encode()).hexdigest()[:12]}.txt"
        if not path.is_file():
            write_atomically(path, str(best_layer(task, table, recipe)).encode())
        return int(path.read_text(encoding="utf-8"))


def _remember(model: IlseSentenceTransformer, table: LayerTable) -> None:
    """Run the head over the whole table once; each protocol and each task then looks its texts up."""
    with torch.inference_mode():
        batches = [model({"input_ids": rows[:, None]}) for rows in torch.arange(len(table.layers)).split(BATCH_TEXTS)]
    said = {
        key: torch.cat([batch[key] for batch in batches])
        for key in ("sentence_embedding", "logits")
        if key in batches[0]
    }

    def encode(texts: Sequence[str], output_value: str = "sentence_embedding", **_: Any) -> Any:
        rows = said[output_value][table.indices(texts)]
        return rows.numpy() if output_value == "sentence_embedding" else list(rows)

    model.encode = encode  # type: ignore[method-assign]


def model_name(run: Run) -> str:
    """Name of a run's model for mteb; seeds and training tasks are told apart by the revision."""
    return "ilse/" + _slug(f"{Path(run.backbone).name}-{run.method}-{run.recipe.name}")


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "-", text)


@contextmanager
def _peak_memory() -> Iterator[dict[str, float]]:
    """The most memory that this process held meanwhile, in MiB; without Linux, since it began."""
    peak = {"mb": 0.0}
    reset, status = Path("/proc/self/clear_refs"), Path("/proc/self/status")
    with suppress(OSError):
        reset.write_text("5")
    yield peak
    if status.is_file():
        (line,) = (line for line in status.read_text(encoding="utf-8").splitlines() if line.startswith("VmHWM"))
        peak["mb"] = int(line.split()[1]) / 2**10
    else:
        unit = 1 if sys.platform == "darwin" else 2**10
        peak["mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
