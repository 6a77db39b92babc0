"""Batches under a budget of tokens, and what happens where memory ends."""

import multiprocessing
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SENTENCES

from ilse_embed import LayerTransformer
from ilse_embed.batches import BATCH_TOKENS, BatchRunner, batches_of

TEXTS = [*SENTENCES, *(f"Text number {i}{' and so on' * (i % 7)}." for i in range(60))]


@pytest.fixture
def backbone(tiny_backbone: Callable[..., Path]) -> LayerTransformer:
    return LayerTransformer(str(tiny_backbone()), max_seq_length=96, on_truncate="ignore")


def runner(backbone: LayerTransformer, **options: Any) -> BatchRunner:
    return BatchRunner(backbone, lambda features: backbone(features)["layer_embeddings"], **options)


def gathered(run: BatchRunner, texts: list[str]) -> torch.Tensor:
    layers = torch.full((len(texts), 4, 32), torch.nan)
    for rows, batch in run(texts):
        assert layers[rows].isnan().all()  # no text twice
        layers[rows] = batch
    assert not layers.isnan().any()  # and none left out
    return layers


@pytest.mark.parametrize(
    ("lengths", "budget", "batches"),
    [
        ([], 10, []),
        ([5], 1, [[0]]),
        ([2, 5, 3], 100, [[1, 2, 0]]),
        ([2, 5, 3, 3], 6, [[1], [2, 3], [0]]),
        ([4, 4, 4, 4], 8, [[0, 1], [2, 3]]),
        ([1, 1, 9], 9, [[2], [0, 1]]),
    ],
)
def test_batches(lengths: list[int], budget: int, batches: list[list[int]]) -> None:
    assert batches_of(lengths, budget) == batches


@pytest.mark.parametrize("prompt", [None, "query: "])
def test_tokens_are_counted_without_padding(backbone: LayerTransformer, prompt: str | None) -> None:
    run = runner(backbone, batch_tokens=200, prompt=prompt)
    gathered(run, TEXTS)
    expected = backbone.preprocess(TEXTS, prompt=prompt)["attention_mask"].sum().item()
    assert run.tokens == expected
    gathered(run, TEXTS)
    assert run.tokens == 2 * expected


def test_the_budget_of_the_device(backbone: LayerTransformer) -> None:
    assert runner(backbone).batch_tokens == BATCH_TOKENS["cpu"]
    with pytest.raises(ValueError, match="batch_tokens is 0; it must be at least 1"):
        runner(backbone, batch_tokens=0)


# ------------------------------------------------------------------------------------------------------ out of memory


def limited(megabytes: int, work: Callable[[], Any], answer: Any) -> None:
    """In a process of its own, which may take so much more memory."""
    with open("/proc/self/statm") as file:  # noqa: PTH123
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + megabytes * 2**20, resource.RLIM_INFINITY))
    try:
        answer.put(work())
    except BaseException as error:
        answer.put(error)


def within(megabytes: int, work: Callable[[], Any]) -> Any:
    context = multiprocessing.get_context("fork")
    answer = context.SimpleQueue()
    child = context.Process(target=limited, args=(megabytes, work, answer))
    child.start()
    result = answer.get()
    child.join(60)
    return result


def test_a_batch_that_does_not_fit_is_halved(backbone: LayerTransformer) -> None:
    """For real: a limit on the process. One batch of all texts takes 500 MB in its attention alone."""
    texts = [f"{number} {'word ' * (80 + number % 10)}" for number in range(3000)]

    def work() -> Any:
        run = runner(backbone, batch_tokens=10**6)
        layers = gathered(run, texts)
        return run.batch_tokens, layers[::500].tolist()

    result = within(300, work)
    assert not isinstance(result, BaseException), result
    budget, layers = result
    assert 96 < budget <= 150_000  # halved at least once, and not down to a text at a time
    expected = gathered(runner(backbone, batch_tokens=96), texts[::500])
    torch.testing.assert_close(torch.tensor(layers), expected, atol=1e-5, rtol=1e-5)


def test_a_text_that_does_not_fit(tiny_backbone: Callable[..., Path]) -> None:
    backbone = LayerTransformer(str(tiny_backbone()), max_seq_length=16384, on_truncate="ignore")
    backbone.model.config._attn_implementation = "eager"  # the whole matrix of attention
    result = within(300, lambda: gathered(runner(backbone), ["a short text", "word " * 16000]).shape)
    assert isinstance(result, MemoryError), result
    assert "a text of 16384 tokens does not fit into memory (cpu): 'word word" in str(result)
    assert "set a smaller max_seq_length" in str(result)


def test_other_errors_are_not_taken_for_a_lack_of_memory(backbone: LayerTransformer) -> None:
    def run(features: dict[str, Any]) -> torch.Tensor:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        list(BatchRunner(backbone, run)(TEXTS))
