"""Which token pooling suits a backbone: share of the first token, and Spearman of every raw layer on STSBenchmark.

    python -m benchmarks.sinks smollm2 --data-dir DIR

Nothing is trained. Scores are on the validation split.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.common import this_run, write_result
from ilse_embed.backbone import POOLINGS
from ilse_embed.extraction import BackboneSource, extract
from ilse_embed.features import fit_scaling
from ilse_embed.scoring import layer_scores
from ilse_embed.sinks import first_token_share
from ilse_embed.store import FeatureStore
from ilse_embed.tasks import load_task
from ilse_embed.weights import cache_dir, smollm2


def main() -> None:
    """Measure one backbone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backbone", help='folder or hub name, or "smollm2"')
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--store", type=Path, default=cache_dir() / "features")
    arguments = parser.parse_args()
    folder = str(smollm2()) if arguments.backbone == "smollm2" else arguments.backbone
    name = Path(folder).name
    task = load_task("STSBenchmark", arguments.data_dir)
    texts = task.texts("validation")
    forms = {}
    for pooling in POOLINGS:
        try:
            backbone = BackboneSource(folder, pooling).load()
        except ValueError as error:
            forms[pooling] = {"refused": str(error)}
            continue
        table = extract(backbone, texts, FeatureStore.for_backbone(arguments.store, backbone))
        share = first_token_share(backbone, skip=int(pooling != "mean"))
        raw = layer_scores(task, table, "validation", None)
        # Fitted on the validation sentences themselves: no label plays a part in it.
        scaled = layer_scores(task, table, "validation", fit_scaling(table, texts))
        forms[pooling] = {
            "largest_share_of_the_first_pooled_token": round(float(share.max()), 3),
            "spearman_raw": [round(score, 2) for score in raw],
            "spearman_standardised": [round(score, 2) for score in scaled],
            "mean_over_layers": {
                "raw": round(sum(raw) / len(raw), 2),
                "standardised": round(sum(scaled) / len(scaled), 2),
            },
            "best_layer": {"raw": round(max(raw), 2), "standardised": round(max(scaled), 2)},
        }
        print(name, pooling, {key: value for key, value in forms[pooling].items() if "spearman" not in key}, flush=True)
    chosen = BackboneSource(folder, "sink_aware").load().pooling
    content = {"run": this_run(), "backbone": name, "chosen": chosen, "forms": forms}
    print("sink_aware takes", chosen, "->", write_result(f"sinks-{name}", content))


if __name__ == "__main__":
    main()
