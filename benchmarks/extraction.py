"""Extraction and encoding against the bare forward pass, and against what others do; peak memory.

    python -m benchmarks.extraction smollm2 --data-dir DIR [--texts 1024] [--device cuda] [--dtype bfloat16]

Everything that is compared takes turns in one process, group by group of texts; ratios are of summed times. Memory is
the peak of a process of its own for each case, on models of random weights.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling

from benchmarks.common import read_result, this_run, write_result
from ilse_embed.backbone import TEXT_ONLY, LayerTransformer
from ilse_embed.batches import batches_of, token_lengths
from ilse_embed.embedding import TextEmbedder
from ilse_embed.encoders import build_encoder
from ilse_embed.extraction import BackboneSource, LayerExtractor
from ilse_embed.model import build
from ilse_embed.store import DTYPES
from ilse_embed.tasks import load_task
from ilse_embed.weights import smollm2

CHUNK = 5000
"""Texts that others pad to one length (the authors' code)."""

MEMORY = {"batch": 32, "tokens": 512, "hidden": 576}


class Clock:
    """Seconds by name."""

    def __init__(self, device: str) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.device = device

    def time(self, name: str, run: Callable[[], Any]) -> None:
        """Run once and add the time."""
        started = time.perf_counter()
        run()
        if self.device != "cpu":
            torch.accelerator.synchronize()
        self.seconds[name] += time.perf_counter() - started

    def ratio(self, over: str, under: str) -> float:
        """How many times as fast ``over`` is as ``under``."""
        return round(self.seconds[under] / self.seconds[over], 3)


def tokens_of(backbone: LayerTransformer, texts: list[str], batch_tokens: int) -> list[dict[str, Any]]:
    """The batches of the extraction, ready on the device."""
    batches = batches_of(token_lengths(backbone, texts), batch_tokens)
    return [
        {
            key: value.to(backbone.model.device)
            for key, value in backbone.preprocess([texts[row] for row in batch]).items()
            if key in ("input_ids", "attention_mask")
        }
        for batch in batches
    ]


def measure_speed(folder: str, name: str, texts: list[str], arguments: argparse.Namespace) -> dict[str, Any]:
    """One task."""
    source = BackboneSource(folder, dtype=arguments.dtype)
    backbone = source.load()
    dtype = {"dtype": backbone.model.dtype}
    stock = SentenceTransformer(
        modules=[
            Transformer(  # plain text, as ours: by itself it would apply the chat template of an instruct model
                folder,
                model_kwargs=dtype,
                processor_kwargs={"padding_side": "right"},
                modality_config=TEXT_ONLY,
                module_output_name="token_embeddings",
            ),
            Pooling(backbone.get_embedding_dimension(), "mean"),
            Normalize(),
        ],
        device=arguments.device,
    )
    if stock.tokenizer.pad_token is None:
        stock.tokenizer.pad_token = stock.tokenizer.eos_token
    shape = (backbone.num_layers, backbone.get_embedding_dimension())
    ours = build(backbone, build_encoder("cayley", *shape, steps=2)).to(arguments.device)
    extractor, embedder = LayerExtractor(backbone), TextEmbedder(ours)
    budget = extractor.runner.batch_tokens
    model = backbone.model
    longest = max(token_lengths(backbone, texts[:CHUNK]))

    def bare(batches: list[dict[str, Any]]) -> None:
        with torch.inference_mode():
            for batch in batches:
                model(**batch, use_cache=False)

    def others(part: list[str]) -> None:
        with torch.inference_mode():
            for start in range(0, len(part), 32):
                batch = backbone.tokenizer(
                    part[start : start + 32], padding="max_length", max_length=longest, return_tensors="pt"
                ).to(model.device)
                output = model(**batch, output_hidden_states=True, use_cache=False)
                mask = batch["attention_mask"][None, :, :, None]
                hidden = torch.stack(output.hidden_states)
                ((hidden * mask).sum(2) / mask.sum(2)).float().cpu()

    step = len(texts) // arguments.texts or 1
    chosen = [text for start in range(0, len(texts), 32 * step) for text in texts[start : start + 32]]
    chosen = chosen[: arguments.texts]
    clock = Clock(arguments.device)
    groups = [chosen[start : start + arguments.group] for start in range(0, len(chosen), arguments.group)]
    slow_texts = 0
    bare(tokens_of(backbone, groups[0][:64], budget))  # warm up
    others(groups[0][:32])
    for number, group in enumerate(groups):
        batches = tokens_of(backbone, group, budget)
        turns: list[tuple[str, Callable[[], Any]]] = [
            ("bare forward", lambda b=batches: bare(b)),
            ("extraction", lambda g=group: extractor(g)),
            ("encode, stock last layer", lambda g=group: stock.encode(g, batch_size=32)),
            ("encode, ours", lambda g=group: ours.encode(g, batch_size=32)),
            ("ilse encode", lambda g=group: embedder(g)),
        ]
        for label, run in turns if number % 2 else turns[::-1]:
            clock.time(label, run)
        few = group[: arguments.others]
        clock.time("all hidden states", lambda f=few: others(f))
        slow_texts += len(few)
        print(name, number, {key: round(value, 1) for key, value in clock.seconds.items()}, flush=True)

    inside = 0.0
    original = model.forward

    def timed(*given: Any, **named: Any) -> Any:
        nonlocal inside
        started, pooled = time.perf_counter(), pooling
        result = original(*given, **named)
        inside += time.perf_counter() - started - (pooling - pooled)
        return result

    pooling = 0.0
    profile = None
    if arguments.device == "cpu":  # elsewhere the time inside is that of launching
        from ilse_embed.pooling import TokenPooler

        pool = TokenPooler.__call__

        def timed_pool(self: TokenPooler, hidden: torch.Tensor) -> torch.Tensor:
            nonlocal pooling
            started = time.perf_counter()
            result = pool(self, hidden)
            pooling += time.perf_counter() - started
            return result

        TokenPooler.__call__ = timed_pool  # type: ignore[method-assign]
        model.forward = timed
        started = time.perf_counter()
        inside_sum = 0.0
        for group in groups:
            inside = pooling = 0.0
            extractor(group)
            inside_sum += inside
        total = time.perf_counter() - started
        TokenPooler.__call__ = pool  # type: ignore[method-assign]
        del model.forward
        profile = round(1 - inside_sum / total, 4)
    lengths = token_lengths(backbone, chosen)
    return {
        "texts": len(chosen),
        "texts_with_all_hidden_states": slow_texts,
        "mean_tokens": round(sum(lengths) / len(lengths), 1),
        "longest_of_5000": longest,
        "batch_tokens": budget,
        "dtype": str(model.dtype),
        "ratios": {
            "extraction / bare forward": clock.ratio("extraction", "bare forward"),
            "encode, ours / stock last layer": clock.ratio("encode, ours", "encode, stock last layer"),
            "ilse encode / encode, stock last layer": clock.ratio("ilse encode", "encode, stock last layer"),
            "extraction / all hidden states, padded to the chunk's longest, per text": round(
                clock.seconds["all hidden states"] / slow_texts * len(chosen) / clock.seconds["extraction"], 2
            ),
        },
        "share_of_time_outside_the_backbone": profile,
        "tokens_per_second": round(sum(lengths) / clock.seconds["extraction"]),
        "seconds": {key: round(value, 2) for key, value in clock.seconds.items()},
    }


PEAK = """
import json, sys, threading, time, torch
from transformers import LlamaConfig, LlamaModel
from ilse_embed.hidden_states import find_blocks, hooks_open
from ilse_embed.pooling import TokenPooler
way, layers, batch, tokens, hidden, device = json.loads(sys.argv[1])
torch.manual_seed(0)
config = LlamaConfig(vocab_size=4096, hidden_size=hidden, intermediate_size=1536, num_hidden_layers=layers,
                     num_attention_heads=9, num_key_value_heads=3)
model = LlamaModel(config).eval().requires_grad_(False).to(device)
features = {"input_ids": torch.randint(4096, (batch, tokens)), "attention_mask": torch.ones(batch, tokens).long()}
features = {key: value.to(device) for key, value in features.items()}

def status(key):
    with open("/proc/self/status") as file:
        return int(next(line for line in file if line.startswith(key)).split()[1]) / 1024

def before():
    if device == "cpu":
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        return status("VmRSS")
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated() / 2**20

def peak():
    return status("VmHWM") if device == "cpu" else torch.cuda.max_memory_allocated() / 2**20

start = before()
with torch.inference_mode():
    if way == "bare":
        model(**features, use_cache=False)
    elif way == "ours":
        pool, pooled = TokenPooler(features, 1), []
        with hooks_open(find_blocks(model), lambda hidden: pooled.append(pool(hidden))):
            pooled.append(pool(model(**features, use_cache=False).last_hidden_state))
        torch.stack(pooled, 1)
    else:
        torch.stack(model(**features, use_cache=False, output_hidden_states=True).hidden_states)
print(json.dumps({"start_mib": round(start), "peak_mib": round(peak())}))
"""


def measure_memory(device: str) -> dict[str, Any]:
    """Peak memory of a forward pass, 24 and 48 layers of one width."""
    cases: dict[str, dict[str, Any]] = {}
    for layers in (24, 48):
        for way in ("bare", "ours", "all hidden states"):
            given = json.dumps([way, layers, *MEMORY.values(), device])
            run = subprocess.run(
                [sys.executable, "-c", PEAK, given],
                capture_output=True,
                text=True,
                check=True,
                env=os.environ
                | {"MALLOC_MMAP_THRESHOLD_": "65536"},  # what is freed is given back: no noise of the heap
            )
            cases[f"{way}, {layers} layers"] = json.loads(run.stdout.splitlines()[-1])
            print("memory", way, layers, cases[f"{way}, {layers} layers"], flush=True)
    for case in cases.values():
        case["added_mib"] = case["peak_mib"] - case["start_mib"]
    ratios = {
        f"{layers} layers, {key}": round(cases[f"ours, {layers} layers"][key] / cases[f"bare, {layers} layers"][key], 3)
        for layers in (24, 48)
        for key in ("peak_mib", "added_mib")
    }
    flat = cases["ours, 48 layers"]["added_mib"] / cases["ours, 24 layers"]["added_mib"]
    return {**MEMORY, "cases": cases, "ours / bare": ratios, "added: 48 / 24 layers": round(flat, 3)}


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backbone", help='folder or hub name, or "smollm2"')
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--tasks", nargs="+", default=["Banking77Classification", "STSBenchmark"])
    parser.add_argument("--texts", type=int, default=1024)
    parser.add_argument("--group", type=int, default=256, help="texts in a turn")
    parser.add_argument("--others", type=int, default=32, help="of them for the slow way with all hidden states")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=list(DTYPES))
    parser.add_argument("--no-memory", action="store_true")
    arguments = parser.parse_args()
    folder = str(smollm2()) if arguments.backbone == "smollm2" else arguments.backbone
    device = "cpu" if arguments.device == "cpu" else torch.cuda.get_device_name().replace(" ", "-")
    result = f"extraction-{Path(folder).name}-{device}"
    run = {"run": this_run(), "threads": torch.get_num_threads()}
    content = read_result(result)  # what is not measured now stays
    if not arguments.no_memory:
        content["memory"] = run | measure_memory(arguments.device)
    for name in arguments.tasks:
        texts = list(dict.fromkeys(load_task(name, arguments.data_dir).texts("train")))
        content[name] = run | measure_speed(folder, name, texts, arguments)
        print(json.dumps(content[name], indent=1), flush=True)
    print(write_result(result, content))


if __name__ == "__main__":
    main()
