"""`ilse extract` killed at random moments, and bytes flipped in its store.

    python -m benchmarks.crash smollm2 --data-dir DIR [--kills 20] [--flips 100]

Killed with SIGKILL while it runs and started again, as often as asked for; whenever a run ends by itself, the store is
compared with that of an undisturbed run, file by file, and the next round starts with an empty one. Then one bit of a
random byte is flipped, again and again: `ilse store verify` must name the file, and reading must refuse it or find the
text missing.
"""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import read_result, this_run, write_result
from ilse_embed.store import FeatureStore, stores_below
from ilse_embed.tasks import load_task
from ilse_embed.weights import smollm2


def main() -> None:
    """Kill and flip."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backbone", help='folder or hub name, or "smollm2"')
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--task", default="Banking77Classification")
    parser.add_argument("--texts", type=int, default=3000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--flips", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    folder = str(smollm2()) if arguments.backbone == "smollm2" else arguments.backbone
    draw = random.Random(arguments.seed)
    texts = load_task(arguments.task, arguments.data_dir).texts("train")
    texts = list(dict.fromkeys(text.replace("\n", " ") for text in texts))[: arguments.texts]  # a line of the file each
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        (root / "texts.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
        command = [sys.executable, "-m", "ilse_embed.cli", "extract", folder, str(root / "texts.txt"), "--output"]
        started = time.perf_counter()
        subprocess.run([*command, str(root / "undisturbed")], check=True)
        whole = time.perf_counter() - started
        name = f"crash-{Path(folder).name}"
        base = {"run": this_run(), "texts": len(texts), "seed": arguments.seed, "seconds_undisturbed": round(whole, 1)}
        content = read_result(name)  # what is not measured now stays
        if arguments.kills:
            content["kills"] = base | kill(command, root, whole, arguments.kills, draw)
            write_result(name, content)
        if arguments.flips:
            content["flips"] = base | flip(stores_below(root / "undisturbed")[0], texts, arguments.flips, draw)
        print(write_result(name, content))


def kill(command: list[str], root: Path, whole: float, kills: int, draw: random.Random) -> dict[str, Any]:
    """Start, kill, start again; compare whenever a run ends by itself, the last time after the last kill."""
    moments: list[float] = []
    rounds: list[dict[str, Any]] = []
    killed_in_round = 0
    while True:
        running = subprocess.Popen([*command, str(root / "killed")], stdout=subprocess.DEVNULL)
        moment = draw.uniform(1, whole) if len(moments) < kills else None
        try:
            code = running.wait(moment)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()
            moments.append(round(float(moment or 0), 1))
            killed_in_round += 1
            print("killed after", moments[-1], "s", flush=True)
            continue
        if code:
            raise RuntimeError(f"the run ended with {code}")
        same = contents(root / "killed") == contents(root / "undisturbed")
        rounds.append({"kills": killed_in_round, "identical": same})
        print(rounds[-1], flush=True)
        shutil.rmtree(root / "killed")
        killed_in_round = 0
        if len(moments) >= kills:
            return {
                "kills": len(moments),
                "seconds_until_the_kill": moments,
                "rounds": rounds,
                "identical_rounds": sum(one["identical"] for one in rounds),
            }


def contents(root: Path) -> dict[str, bytes]:
    """Every file that is not a temporary one of a killed run."""
    files = (path for path in root.rglob("*") if path.is_file() and not path.name.endswith(".tmp"))
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def flip(folder: Path, texts: list[str], flips: int, draw: random.Random) -> dict[str, Any]:
    """Flip one bit of one byte, a place drawn over all bytes of the store; look; put it back."""
    files = sorted(folder.iterdir())
    sizes = np.array([path.stat().st_size for path in files])
    true = FeatureStore.open(folder).table(texts).layers
    found = named = refused = served_damaged = missing = 0
    for _ in range(flips):
        place = draw.randrange(int(sizes.sum()))
        path = files[int(np.searchsorted(sizes.cumsum(), place, side="right"))]
        offset, bit = place - int(sizes.cumsum()[files.index(path)] - path.stat().st_size), 1 << draw.randrange(8)
        toggle(path, offset, bit)
        problems = [one for one, _ in FeatureStore.problems(folder)]
        found += bool(problems)
        named += problems == [path]
        try:
            served_damaged += not torch.equal(FeatureStore.open(folder).table(texts).layers, true)
        except OSError:
            refused += 1
        except KeyError:
            missing += 1
        toggle(path, offset, bit)
    return {
        "flips": flips,
        "found": found,
        "named": named,
        "reading_refused": refused,
        "text_no_longer_found": missing,
        "damage_served": served_damaged,
    }


def toggle(path: Path, offset: int, bit: int) -> None:
    """Flip a bit of a file where it is."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ bit]))


if __name__ == "__main__":
    main()
