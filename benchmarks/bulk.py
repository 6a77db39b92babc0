"""`ilse encode` on a million short texts with a tiny backbone of random weights: memory, a kill, and no text lost.

    python -m benchmarks.bulk [--texts 1000000]

The first run is killed with SIGKILL at a random moment and started again. Memory is that of the process, every second.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from pyarrow import parquet
from transformers import AutoTokenizer, LlamaConfig, LlamaModel

from benchmarks.common import this_run, write_result
from ilse_embed import LayerTransformer, build, build_encoder
from ilse_embed.weights import smollm2

WORDS = ["where", "is", "my", "parcel", "card", "lost", "how", "do", "I", "change", "the", "address", "of", "order"]


def main() -> None:
    """Embed, kill, embed, count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        with (root / "texts.txt").open("w", encoding="utf-8") as file:
            for number in range(arguments.texts):
                file.write(f"{number} {' '.join(draw.choices(WORDS, k=draw.randrange(2, 9)))}\n")
        save_model(root)
        command = [sys.executable, "-m", "ilse_embed.cli", "encode", str(root / "model"), str(root / "texts.txt")]
        command += ["--output", str(root / "out")]
        first = watch(command, kill_after=None if arguments.texts < 1000 else draw.uniform(60, 120))
        parts_then = len(list((root / "out").glob("part-*.parquet")))
        second = watch(command)
        size = sum(path.stat().st_size for path in (root / "out").glob("*.parquet"))
        content: dict[str, Any] = {
            "run": this_run(),
            "texts": arguments.texts,
            "seed": arguments.seed,
            "killed_after_seconds": first["seconds"] if first["killed"] else None,
            "parts_at_the_kill": parts_then,
            "runs": [first, second],
            "bytes_out": size,
            **check(root / "texts.txt", root / "out"),
        }
    print({key: value for key, value in content.items() if key not in ("run", "runs")})
    print(write_result("bulk", content))


def save_model(root: Path) -> None:
    """A Cayley-Encoder on a Llama of two layers of width 32, with SmolLM2's tokenizer."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(smollm2())
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaModel(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(root / "backbone")
    tokenizer.save_pretrained(root / "backbone")
    backbone = LayerTransformer(str(root / "backbone"), max_seq_length=64)
    build(backbone, build_encoder("cayley", backbone.num_layers, 32, hidden=64)).save(str(root / "model"))


def watch(command: list[str], kill_after: float | None = None) -> dict[str, Any]:
    """Run, with the memory of the process each second, and its mean over the tenths of the time after the start."""
    started = time.perf_counter()
    running = subprocess.Popen(command)
    process, memory, killed = psutil.Process(running.pid), [], False
    while running.poll() is None:
        seconds = time.perf_counter() - started
        if kill_after is not None and seconds > kill_after:
            running.kill()
            running.wait()
            killed = True
            break
        try:
            memory.append((seconds, process.memory_info().rss / 2**20))
        except psutil.NoSuchProcess:
            break
        time.sleep(1)
    if running.wait() and not killed:
        raise RuntimeError(f"the run ended with {running.returncode}")
    settled = [size for seconds, size in memory if seconds > 20]
    tenth = max(1, len(settled) // 10)
    tenths = [round(sum(settled[i : i + tenth]) / tenth) for i in range(0, tenth * 10, tenth)] if settled else []
    return {
        "seconds": round(time.perf_counter() - started, 1),
        "killed": killed,
        "peak_mib": round(max(size for _, size in memory)),
        "mean_mib_by_tenth": tenths,
    }


def check(texts: Path, output: Path) -> dict[str, int]:
    """Compare what came out with what went in, row by row."""
    lost = doubled = wrong = rows = 0
    expected = 0
    with texts.open(encoding="utf-8") as file:
        for part in sorted(output.glob("part-*.parquet")):
            table = parquet.read_table(part, columns=["row", "text"])
            for row, text in zip(table["row"].to_pylist(), table["text"].to_pylist(), strict=True):
                doubled += row < expected
                while row > expected:
                    file.readline()
                    lost, expected = lost + 1, expected + 1
                wrong += file.readline().removesuffix("\n") != text
                rows, expected = rows + 1, row + 1
        lost += sum(1 for _ in file)
    return {"rows": rows, "lost": lost, "doubled": doubled, "wrong": wrong}


if __name__ == "__main__":
    main()
