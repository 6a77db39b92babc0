"""Better only where the interval says so."""

import numpy as np
import pytest
from scipy.stats import spearmanr
from test_scoring import LABELS, intents_task, sts_task

from ilse_embed.comparison import Difference, Resampled, Score, compare, paired_bootstrap, resample, scorer_of
from ilse_embed.grid import Results, Run
from ilse_embed.recipes import Recipe
from ilse_embed.tasks import Labelled


def said(right: float, seeds: int, n: int = 400, seed: int = 0) -> np.ndarray:
    """Outcomes of so many seeds, of which a share is right (label 0)."""
    return (np.random.default_rng(seed).random((seeds, n)) > right).astype(int)


def accuracy(values: np.ndarray) -> Score:
    return lambda drawn: 100 * float(np.mean(values[drawn] == 0))


def resampled(*methods: np.ndarray) -> list[Resampled]:
    return [resample(outcomes, accuracy) for outcomes in methods]


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [
        (said(0.9, 3), said(0.7, 3, seed=1), "better"),
        (said(0.7, 3), said(0.9, 2, seed=1), "worse"),
        (said(0.8, 3), said(0.8, 3, seed=1), "level"),
    ],
)
def test_verdict(first: np.ndarray, second: np.ndarray, verdict: str) -> None:
    one, two = resampled(first, second)
    found = paired_bootstrap(one, two)
    assert found.verdict == verdict and found.low <= found.mean <= found.high
    assert found.mean == pytest.approx(100 * ((first == 0).mean() - (second == 0).mean()))
    back = paired_bootstrap(two, one)
    assert back.mean == pytest.approx(-found.mean) and back.low == pytest.approx(-found.high, abs=0.7)


def test_pairing_makes_the_interval_narrow() -> None:
    """Two methods that differ on 8 of 400 examples: the examples that both find hard do not count as noise."""
    first = said(0.6, 1)
    second = first.copy()
    second[0, np.flatnonzero(first[0] == 0)[:8]] = 1
    found = paired_bootstrap(*resampled(first, second))
    assert found.mean == pytest.approx(2) and found.verdict == "better" and found.high - found.low < 3.5
    # the exact standard error of the mean of 400 paired differences, 8 of them 1 and the others 0
    spread = 100 * np.std([1] * 8 + [0] * 392) / np.sqrt(400)
    assert found.high - found.low == pytest.approx(2 * 1.96 * spread, rel=0.15)


def test_seeds_are_part_of_the_interval() -> None:
    """The same mean with seeds far apart is less certain."""
    near = np.concatenate([said(0.8, 1, seed=seed) for seed in range(3)])
    far = np.concatenate([said(right, 1, seed=9) for right in (0.6, 0.8, 1.0)])
    other = said(0.7, 3, seed=5)
    narrow, wide = (paired_bootstrap(*resampled(one, other)) for one in (near, far))
    assert wide.high - wide.low > 2 * (narrow.high - narrow.low)
    assert (narrow.verdict, wide.verdict) == ("better", "level")


def test_other_examples_are_refused() -> None:
    with pytest.raises(ValueError, match="outcomes of 400 and 300 test examples cannot be compared"):
        paired_bootstrap(*resampled(said(0.5, 1), said(0.5, 1, n=300)))


def test_scores_are_those_of_scipy_and_the_labels() -> None:
    task, _ = sts_task()
    cosines = np.random.default_rng(0).normal(size=20).round(1)  # some are equal
    drawn = np.array([3, 3, 7, 0, 19, 12, 5])
    wanted = 100 * spearmanr(cosines[drawn], task.splits["test"].scores[drawn]).statistic
    assert scorer_of(task)(cosines)(drawn) == pytest.approx(wanted)
    task, _ = intents_task()
    assert isinstance(task.splits["test"], Labelled)
    labels = np.array([sorted(LABELS).index(label) for label in task.splits["test"].labels])
    assert scorer_of(task)(labels)(np.arange(30)) == 100
    assert scorer_of(task)((labels + 1) % 3)(np.arange(30)) == 0


def test_only_what_is_there_is_compared(tmp_path) -> None:
    run = Run("tiny", "set", Recipe(), "STSBenchmark", "sts", 0, ("STSBenchmark",))
    assert compare(Results(tmp_path), [run], lambda name: sts_task()[0], "cayley") == []
    assert Difference(1, -1, 3).verdict == "level"
