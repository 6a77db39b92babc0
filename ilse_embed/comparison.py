"""Is one method better than another? Means, spreads, and a paired bootstrap interval of the difference.

Letters: ``n`` test examples, ``S`` seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from ilse_embed.grid import Results, Run
from ilse_embed.tasks import Pairs, Task

RESAMPLES = 1000
LEVEL = 0.95

Outcomes = NDArray[Any]
"""(S, n): of each seed and test example the cosine, or the position of the predicted label."""


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


def paired_bootstrap(
    first: Outcomes, second: Outcomes, score: Callable[[Outcomes, NDArray[np.intp]], float], seed: int = 0
) -> Difference:
    """The difference of two methods on the same test examples, each with its seeds.

    Each resample draws the test examples, the same for both, and of each method its seeds; the interval is between the
    percentiles of the differences (Efron and Tibshirani, "An Introduction to the Bootstrap", chapter 13).

    Args:
        first: (S, n)
        second: (S', n)
        score: Takes outcomes of one seed (n,) and the examples drawn (n,); gives the score x 100.
        seed: Draws the resamples.

    Raises:
        ValueError: If the two are of different examples.
    """
    if first.shape[1:] != second.shape[1:]:
        raise ValueError(f"outcomes of {first.shape[1:]} and {second.shape[1:]} test examples cannot be compared")
    rng, examples = np.random.default_rng(seed), first.shape[1]

    def mean(outcomes: Sequence[Any], drawn: NDArray[np.intp]) -> float:
        return float(np.mean([score(one, drawn) for one in outcomes]))

    everything = np.arange(examples)
    differences = []
    for _ in range(RESAMPLES):
        drawn = rng.integers(examples, size=(examples,))
        scores = []
        for outcomes in (first, second):
            seeds, counts = np.unique(rng.integers(len(outcomes), size=len(outcomes)), return_counts=True)
            values = [score(outcomes[one], drawn) for one in seeds]
            scores.append(float(np.average(values, weights=counts)))
        differences.append(scores[0] - scores[1])
    low, high = np.quantile(differences, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Difference(mean(list(first), everything) - mean(list(second), everything), float(low), float(high))


def scorer(task: Task) -> Callable[[Outcomes, NDArray[np.intp]], float]:
    """The score x 100 of drawn test examples: Spearman correlation, or accuracy of the linear head."""
    data = task.splits["test"]
    if isinstance(data, Pairs):
        gold = data.scores

        def spearman(said: Outcomes, drawn: NDArray[np.intp]) -> float:
            ranks = [rankdata(values[drawn]) for values in (said, gold)]
            return 100 * float(np.corrcoef(ranks[0], ranks[1])[0, 1])

        return spearman
    labels = task.numbers(data.labels)

    def accuracy(said: Outcomes, drawn: NDArray[np.intp]) -> float:
        return 100 * float(np.mean(said[drawn] == labels[drawn]))

    return accuracy


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
        others = groups.get((backbone, recipe, str(reference), name))
        of_outcomes = task_name if members[0].kind == "sts" else f"{task_name}-head"
        if others and method != reference and name == of_outcomes:
            mine, theirs = (np.stack([results.outcomes(run, task_name) for run in side]) for side in (members, others))
            found = paired_bootstrap(mine, theirs, scorer(task_of(task_name)))
            row["difference"] = {key: round(value, 2) for key, value in asdict(found).items()}
            row["verdict"] = found.verdict
        rows.append(row)
    return rows
