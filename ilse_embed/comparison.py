"""Is one method better than another? Means, spreads, and a paired bootstrap interval of the difference.

Letters: ``n`` test examples, ``S`` seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ilse_embed.grid import Results, Run
from ilse_embed.tasks import Pairs, Task

RESAMPLES = 1000
LEVEL = 0.95

Outcomes = NDArray[Any]
"""(n,) or (S, n): of each test example the cosine, or the position of the predicted label."""

Score = Callable[[NDArray[np.intp]], float]
"""The score x 100 of the test examples that were drawn, by their positions."""

Scorer = Callable[[Outcomes], Score]
"""Prepares the scoring of one seed's outcomes, (n,)."""


@dataclass(frozen=True)
class Difference:
    """How much better the first of two methods is.

    Attributes:
        mean: Mean over seeds of the first minus that of the second, in points.
        low: Lower end of the interval.
        high: Upper end of the interval.
    """

    mean: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """One of "better" and "worse" where the interval leaves out 0, else "level"."""
        return "better" if self.low > 0 else "worse" if self.high < 0 else "level"


@dataclass(frozen=True)
class Resampled:
    """Scores x 100 of one method, on all test examples and on resamples of them, which are the same for all methods.

    Attributes:
        examples: Number n of test examples.
        scores: (S,)
        resamples: (S, `RESAMPLES`)
    """

    examples: int
    scores: NDArray[np.float64]
    resamples: NDArray[np.float64]


def resample(outcomes: Outcomes, scorer: Scorer, seed: int = 0) -> Resampled:
    """Score each seed of a method on all examples, and on resamples drawn with replacement.

    Args:
        outcomes: (S, n)
        scorer: See `scorer_of`.
        seed: Draws the resamples.
    """
    rng, examples = np.random.default_rng(seed), outcomes.shape[1]
    scores = [scorer(one) for one in outcomes]
    draws = (rng.integers(examples, size=(examples,)) for _ in range(RESAMPLES))
    resamples = np.array([[score(drawn) for score in scores] for drawn in draws]).T
    return Resampled(examples, np.array([score(np.arange(examples)) for score in scores]), resamples)


def paired_bootstrap(first: Resampled, second: Resampled, seed: int = 0) -> Difference:
    """The difference of two methods on the same test examples, each with its seeds.

    Each resample draws the test examples, the same for both, and of each method its seeds; the interval is between the
    percentiles of the differences (Efron and Tibshirani, "An Introduction to the Bootstrap", chapter 13).

    Args:
        first: One method.
        second: The other one.
        seed: Draws the seeds of the methods.

    Raises:
        ValueError: If the two are of different examples.
    """
    if first.examples != second.examples:
        raise ValueError(f"outcomes of {first.examples} and {second.examples} test examples cannot be compared")
    rng = np.random.default_rng(seed)

    def drawn(side: Resampled) -> NDArray[np.float64]:
        seeds = rng.integers(len(side.scores), size=side.resamples.shape)
        means: NDArray[np.float64] = np.take_along_axis(side.resamples, seeds, 0).mean(0)
        return means

    low, high = np.quantile(drawn(first) - drawn(second), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Difference(float(first.scores.mean() - second.scores.mean()), float(low), float(high))


def scorer_of(task: Task) -> Scorer:
    """Spearman correlation x 100, or accuracy x 100 of the linear head, on the test split of a task."""
    data = task.splits["test"]
    if isinstance(data, Pairs):
        gold = _ranks(data.scores)

        def spearman(said: Outcomes) -> Score:
            ranks = _ranks(said)
            return lambda drawn: 100 * float(np.corrcoef(ranks(drawn), gold(drawn))[0, 1])

        return spearman
    labels = task.numbers(data.labels)

    def accuracy(said: Outcomes) -> Score:
        right = said == labels
        return lambda drawn: 100 * float(np.mean(right[drawn]))

    return accuracy


def _ranks(values: NDArray[Any]) -> Callable[[NDArray[np.intp]], NDArray[np.float64]]:
    """Ranks of drawn values among each other, equal ones sharing their mean, without sorting at each draw."""
    distinct, position = np.unique(values, return_inverse=True)

    def ranks(drawn: NDArray[np.intp]) -> NDArray[np.float64]:
        counts = np.bincount(position[drawn], minlength=len(distinct))
        return np.asarray((np.cumsum(counts) - (counts - 1) / 2)[position[drawn]])

    return ranks


def compare(
    results: Results, runs: Sequence[Run], task_of: Callable[[str], Task], reference: str | None = None
) -> list[dict[str, Any]]:
    """Every method of a grid on every result that is there: mean and spread over seeds, and against a reference.

    Args:
        results: Where the results are.
        runs: The runs of the grid.
        task_of: Gives a task by its name.
        reference: Spelling of the method that the others are compared with, in the same recipe on the same backbone;
            by outcomes of single examples, so on similarity and on the protocol "head".

    Returns:
        A row for each backbone, recipe, method and result: ``mean`` and ``spread`` (standard deviation over seeds, None
        for one seed) x 100, and where there is a reference the `Difference` of the method to it and its verdict.
    """
    groups: dict[tuple[str, str, str, str], list[Run]] = {}
    for run in runs:
        for name in run.result_names:
            if results.score(run, name) is not None:
                groups.setdefault((run.backbone, run.recipe.name, run.method, name), []).append(run)
    resampled: dict[tuple[str, str, str, str], Resampled] = {}

    def of(key: tuple[str, str, str, str], task: str) -> Resampled:
        if key not in resampled:
            outcomes = np.stack([results.outcomes(run, task) for run in groups[key]])
            resampled[key] = resample(outcomes, scorer_of(task_of(task)))
        return resampled[key]

    rows = []
    for (backbone, recipe, method, name), members in groups.items():
        task_name = members[0].task_of_result[name]
        scores = [results.score(run, name) or 0.0 for run in members]
        notes = [results.notes[run.id] for run in members]
        row: dict[str, Any] = {
            "backbone": backbone,
            "recipe": recipe,
            "method": method,
            "result": name,
            "task": task_name,
            "kind": members[0].kind,
            "mean": round(float(np.mean(scores)), 2),
            "spread": round(float(np.std(scores, ddof=1)), 2) if len(scores) > 1 else None,
            "seeds": [run.seed for run in members],
            "parameters": notes[0]["parameters"],
            "training_seconds": round(float(np.mean([note["seconds"]["training"] for note in notes])), 1),
        }
        mine, theirs = (backbone, recipe, method, name), (backbone, recipe, str(reference), name)
        of_outcomes = task_name if members[0].kind == "sts" else f"{task_name}-head"
        if theirs in groups and method != reference and name == of_outcomes:
            found = paired_bootstrap(of(mine, task_name), of(theirs, task_name))
            row["difference"] = {key: round(value, 2) for key, value in asdict(found).items()}
            row["verdict"] = found.verdict
        rows.append(row)
    return rows
