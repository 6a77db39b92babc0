"""Hyperparameter search with Optuna, on the validation score; no trial reads the test split.

Any number of processes share a study, and the order of the trial numbers settles who does what: a trial is given up
before it trains if an earlier one has its configuration, or if there are as many earlier ones as are wanted. Nothing
else is atomic in every database: in SQLite two processes can take the same waiting trial, so there are none.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

try:
    import optuna
    import sqlalchemy
except ImportError as error:
    raise ImportError("a search needs an extra: pip install 'ilse-embed[search]'") from error
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.trial import FrozenTrial, Trial, TrialState

from ilse_embed.features import LayerTable
from ilse_embed.recipes import Recipe
from ilse_embed.spaces import Range, Space, Values, choices
from ilse_embed.studies import check_settings, open_study, quiet, shown, sqlite_url
from ilse_embed.tasks import Task
from ilse_embed.training import TrainedHead, fingerprint, train

logger = logging.getLogger(__name__)

KEY, GIVEN_UP = "configuration", "given up"
"""Attributes of a trial: its configuration, once it is drawn; why it ended without a score."""

PRUNERS = {
    "median": optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=3),
    "none": optuna.pruners.NopPruner(),
}
"""When a trial is stopped: "median" where its best score so far is below the median of complete trials at that epoch,
from the third epoch and the sixth trial on."""

GRACE = 6
"""Signs of life that a trial may miss."""

FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)
LIVE = (*FINISHED, TrialState.RUNNING)

Progress = Callable[[int, int, float], None]
"""Called after each trial with (finished trials, wanted trials, best validation score; NaN before the first)."""


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Attributes:
        recipe: The configuration with the best validation score; its name tells in what it differs from the base.
        validation: That score x 100: Spearman or accuracy.
        trials: Finished trials of the study, the pruned ones included.
        pruned: Trials that were stopped early, or that diverged.
        repeated: Draws of a configuration that was there already, and was not trained again.
        size: Number of configurations in the space, or ``math.inf``.
        exhausted: Whether all of them are tried and fewer than the wanted trials.
        seconds: Wall time of this call.
        rows: For each finished trial its number, state, validation score, epochs and options.
    """

    recipe: Recipe
    validation: float
    trials: int
    pruned: int
    repeated: int
    size: float
    exhausted: bool
    seconds: float
    rows: list[dict[str, Any]]


def search(
    task: Task,
    table: LayerTable,
    encoder: str,
    space: Space,
    output: Path,
    *,
    trials: int = 50,
    storage: str | None = None,
    name: str = "search",
    seed: int = 0,
    encoder_args: dict[str, Any] | None = None,
    pruner: str | optuna.pruners.BasePruner = "median",
    heartbeat: int = 10,
    progress: Progress | None = None,
) -> SearchResult:
    """Search a space until the study has so many finished trials; call it again and it does what is missing.

    Trials of a process that was killed are run again, from their last checkpoint. Several processes may search at once,
    with the same ``storage`` and ``name``.

    Args:
        task: Its training and validation split are used.
        table: Layer features of their texts, for all trials.
        encoder: Name of the encoder.
        space: What to search.
        output: Folder for the study, the checkpoints of unfinished trials and ``recipe.json``, the best recipe.
        trials: Finished trials that the study is to have.
        storage: Where trials are kept, as a database URL of Optuna; by default the SQLite file ``search.db`` in
            ``output``, for processes of one machine.
        name: Of the study in the storage.
        seed: Of each training, and of the draws.
        encoder_args: Options of the encoder beyond the recipe's.
        pruner: Decides after each epoch whether a trial goes on: one of `PRUNERS`, or any of Optuna.
        heartbeat: Seconds between signs of life. A trial without one for six times as long is taken for dead.
        progress: Called after each trial.

    Raises:
        ValueError: As `Space.check`, or if the study is of another search.
        OSError: If the storage cannot be opened or written.
        FloatingPointError: If no trial has a finite score.
    """
    started = time.perf_counter()
    shape, compressed = (table.layers.shape[1], table.layers.shape[2]), table.basis is not None
    space.check(task, shape, encoder, encoder_args=encoder_args, compressed=compressed)
    if trials < 1:
        raise ValueError(f"trials is {trials}; allowed are whole numbers from 1")
    if isinstance(pruner, str) and pruner not in PRUNERS:
        raise ValueError(f"pruner is {pruner!r}; allowed are {json.dumps(list(PRUNERS))}")
    pruner = PRUNERS[pruner] if isinstance(pruner, str) else pruner
    output.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {"task": task.name, "data": fingerprint(task), "features": [*shape, table.source]}
    settings |= {"prompt": table.prompt, "encoder": encoder, "encoder_args": encoder_args or {}, "seed": seed}
    settings |= {f"recipe.{option}": value for option, value in asdict(space.base).items() if option != "name"}
    settings |= {f"space.{option}": repr(values) for option, values in space.options.items()}
    url = storage or sqlite_url(output / "search.db")
    with quiet():
        try:
            study = open_study(url, name, pruner, heartbeat, GRACE * heartbeat)
            check_settings(study, settings, f"the study {name!r} in {shown(url)}")
            run = partial(train, task, table, encoder, seed=seed, encoder_args=encoder_args)
            worker = _Worker(study, space, run, output / "checkpoints", trials, seed, heartbeat)
            worker.until_done(progress)
            result = _result(study, space, trials, time.perf_counter() - started)
        except (sqlalchemy.exc.SQLAlchemyError, StorageInternalError) as error:
            raise OSError(f"the storage {shown(url)} failed: {error}; check the URL and the database") from error
    result.recipe.save(output / "recipe.json")
    return result


class _GivenUp(Exception):
    """This trial does not train; Optuna's samplers take no notice of it."""


@dataclass
class _Worker:
    """One process of a search."""

    study: optuna.Study
    space: Space
    train: Callable[..., TrainedHead]
    checkpoints: Path
    trials: int
    seed: int
    heartbeat: int
    another: dict[str, Any] | None = None
    undrawn: dict[int, float] = field(default_factory=dict)
    failure: Exception | None = None

    def until_done(self, progress: Progress | None) -> None:
        """Run trials until enough are finished or the space is exhausted, those of other processes included."""
        while True:
            live = self._live()
            finished = [trial for trial in live if trial.state in FINISHED]
            tried = {_key(trial) for trial in live}
            for trial in finished:
                shutil.rmtree(self.checkpoints / _key(trial), ignore_errors=True)
            if progress is not None:
                progress(len(finished), self.trials, max(map(_score, finished), default=math.nan))
            if len(live) < self.trials and len(tried) < self.space.size:
                self._run_one()
            elif len(finished) < min(len(live), self.trials):
                time.sleep(min(1.0, self.heartbeat / 4))  # a trial of another process may have to be run again
                self._find_dead()
            else:
                return

    def _run_one(self) -> None:
        try:
            self.study.optimize(self._trial, n_trials=1, catch=(_GivenUp,), gc_after_trial=True)
        except (ValueError, UpdateFinishedTrialError) as error:
            if error is self.failure:
                raise
            logger.warning("another process took a trial of this one for dead; it is run again (%s)", error)

    def _trial(self, trial: Trial) -> float:
        """Draw a configuration and train with it, unless another trial has it."""
        try:
            return self._train(trial)
        except FloatingPointError as error:
            raise optuna.TrialPruned(str(error)) from error
        except (optuna.TrialPruned, UpdateFinishedTrialError):
            raise
        except Exception as error:
            trial.set_user_attr(GIVEN_UP, str(error))  # and is not tried again, as one that was killed is
            self.failure = error
            raise

    def _train(self, trial: Trial) -> float:
        # A generator for each trial: processes draw differently, and a search that was killed as one that was not.
        seeds = np.random.SeedSequence([self.seed, trial.number])
        sampler = optuna.samplers.TPESampler(seed=int(seeds.generate_state(1)[0]))
        self.study.sampler = optuna.samplers.PartialFixedSampler(self._planned() or {}, sampler)
        params = self.space.draw(lambda option, values: _suggest(trial, option, values))
        recipe = self.space.base.replace(**params)
        key = recipe.digest
        trial.set_user_attr(KEY, key)
        earlier = self._earlier(trial.number)
        if any(_key(other) == key for other in earlier):
            self.another = self._untried(np.random.default_rng(seeds))
            raise _GivenUp("repeated")
        if len(earlier) >= self.trials:
            raise _GivenUp("enough")
        checkpoints, progress = self.checkpoints / key, self._reporter(trial, key)
        return self.train(recipe, checkpoints=checkpoints, progress=progress).validation

    def _planned(self) -> dict[str, Any] | None:
        """The configuration of a trial that was broken off, or the one that is to follow a repetition."""
        live = {_key(trial) for trial in self._live()}
        for trial in self.study.get_trials(deepcopy=False, states=(TrialState.FAIL,)):
            if _key(trial) not in live | {""} and GIVEN_UP not in trial.user_attrs:
                return trial.params
        planned, self.another = self.another, None
        return planned

    def _reporter(self, trial: Trial, key: str) -> Callable[[int, int, float], None]:
        """Tells the study the score of each epoch, and ends the training if the pruner says so."""
        known: dict[int, float] = {}  # of a trial that died: training goes on after its last checkpoint
        for other in self.study.get_trials(deepcopy=False, states=(TrialState.FAIL,)):
            if _key(other) == key:
                known |= other.intermediate_values
        for epoch, score in sorted(known.items()):
            trial.report(score, epoch)

        def report(done: int, most: int, score: float) -> None:
            if done not in known:
                trial.report(score, done)
            if trial.should_prune():
                raise optuna.TrialPruned(f"epoch {done}: {score:.2f}")

        return report

    def _live(self) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False, states=LIVE)

    def _earlier(self, number: int) -> list[FrozenTrial]:
        """Live trials with a lower number, as soon as each has drawn its configuration."""
        while True:
            earlier = [trial for trial in self._live() if trial.number < number]
            if all(_key(trial) for trial in earlier if trial.state == TrialState.RUNNING):
                return earlier
            time.sleep(0.05)
            self._find_dead()

    def _untried(self, generator: np.random.Generator) -> dict[str, Any] | None:
        """A configuration of a finite space that nobody has, so that the space comes to its end."""
        tried = {_key(trial) for trial in self._live()}
        if not len(tried) < self.space.size < math.inf:
            return None

        def pick(option: str, values: Values) -> Any:
            few = choices(values) or ()
            return few[int(generator.integers(len(few)))]

        while self.space.base.replace(**(params := self.space.draw(pick))).digest in tried:
            pass
        return params

    def _find_dead(self) -> None:
        """Give trials without a sign of life up, so that they are run again."""
        optuna.storages.fail_stale_trials(self.study)
        now = time.monotonic()
        running = self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        # Killed before its first sign of life, which Optuna would wait for.
        undrawn = [trial.number for trial in running if KEY not in trial.user_attrs]
        self.undrawn = {number: self.undrawn.get(number, now) for number in undrawn}
        for number, since in self.undrawn.items():
            if now - since > GRACE * self.heartbeat:
                with contextlib.suppress(ValueError, UpdateFinishedTrialError):  # another process did it
                    self.study.tell(number, state=TrialState.FAIL)


def _result(study: optuna.Study, space: Space, trials: int, seconds: float) -> SearchResult:
    everything = study.get_trials(deepcopy=False)
    finished = [trial for trial in everything if trial.state in FINISHED]
    complete = [trial for trial in finished if trial.state == TrialState.COMPLETE]
    if not complete:
        raise FloatingPointError(
            f"none of {len(finished)} trials has a finite validation score; lower the learning rate in the space or "
            "turn the scaling on"
        )
    best = max(complete, key=lambda trial: (_score(trial), -trial.number))
    rows = [
        {"number": trial.number, "state": trial.state.name.lower(), "validation": trial.value}
        | {"epochs": max(trial.intermediate_values, default=0), "options": trial.params}
        for trial in finished
    ]
    return SearchResult(
        recipe=space.base.replace(**best.params),
        validation=_score(best),
        trials=len(finished),
        pruned=len(finished) - len(complete),
        repeated=sum(trial.user_attrs.get(GIVEN_UP) == "repeated" for trial in everything),
        size=space.size,
        exhausted=len(finished) < trials,
        seconds=seconds,
        rows=rows,
    )


def _key(trial: FrozenTrial) -> str:
    """The configuration of a trial; empty before it is drawn."""
    return str(trial.user_attrs.get(KEY, ""))


def _score(trial: FrozenTrial) -> float:
    return -math.inf if trial.state != TrialState.COMPLETE or trial.value is None else trial.value


def _suggest(trial: Trial, option: str, values: Values) -> Any:
    if not isinstance(values, Range):
        return trial.suggest_categorical(option, values)
    if values.whole:
        return trial.suggest_int(option, int(values.low), int(values.high), log=values.log)
    return trial.suggest_float(option, values.low, values.high, log=values.log)
