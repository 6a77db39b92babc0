"""Tables of results as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

SECTIONS = {
    ("sts", ""): "STS: Spearman correlation of the cosine x 100",
    ("sts", "-leakfree"): "STS without test pairs that hold a training sentence",
    ("classification", "-head"): "Classification, protocol `head`: accuracy of the linear head, %",
    (
        "classification",
        "",
    ): "Classification, protocol `probe`: few-shot logistic regression on it, accuracy, %",
    (
        "classification",
        "-full-probe",
    ): "Classification, protocol `full-probe`: the same on all labels, accuracy, %",
}
"""Titles, by kind of task and what the evaluation appends to its name."""

SIGNS = {"better": " +", "worse": " -", "level": " ="}


def markdown(rows: Sequence[dict[str, Any]], reference: str) -> str:
    """One table for each backbone, recipe and protocol; methods below each other, tasks side by side.

    Args:
        rows: As `ilse_embed.comparison.compare` gives them.
        reference: What they are compared with.
    """
    lines = [
        f"Mean over seeds, ± their standard deviation; +, -, = : better, worse, level with `{reference}` by a 95 % "
        "paired bootstrap over test examples and seeds. Made by `ilse grid table`.",
    ]
    groups = dict.fromkeys((row["backbone"], row["recipe"]) for row in rows)
    for backbone, recipe in groups:
        lines += ["", f"## {backbone}, recipe `{recipe}`"]
        for (kind, suffix), title in SECTIONS.items():
            some = [
                row
                for row in rows
                if (row["backbone"], row["recipe"], row["kind"]) == (backbone, recipe, kind)
                and row["result"] == row["task"] + suffix
            ]
            if some:
                lines += ["", f"**{title}**", "", *_table(some)]
    return "\n".join(lines) + "\n"


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    lines = [
        "| " + " | ".join(["method", *tasks, "mean", "seeds", "parameters", "training s"]) + " |",
        "| --- |" + " ---: |" * (len(tasks) + 4),
    ]
    for method in dict.fromkeys(row["method"] for row in rows):
        cells = {row["task"]: row for row in rows if row["method"] == method}
        mean = "" if len(cells) < len(tasks) else f"{sum(row['mean'] for row in cells.values()) / len(tasks):.1f}"
        seeds = max(len(row["seeds"]) for row in cells.values())
        most, longest = (max(row[key] for row in cells.values()) for key in ("parameters", "training_seconds"))
        shown = [cell(cells.get(task)) for task in tasks]
        lines.append("| " + " | ".join([f"`{method}`", *shown, mean, str(seeds), f"{most:,}", f"{longest:.0f}"]) + " |")
    return lines


def cell(row: dict[str, Any] | None) -> str:
    """Mean, spread and verdict of one method on one result; empty where there is none."""
    if row is None:
        return ""
    spread = "" if row["spread"] is None else f" ± {row['spread']:.1f}"
    return f"{row['mean']:.1f}{spread}{SIGNS.get(row.get('verdict', ''), '')}"
