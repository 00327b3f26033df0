"""Plans of 512 samples for rows of 16,384 tokens on 8 ranks, ours next to those of other trainers on the same lengths.

Efficiency is what the ranks compute over what they take when all wait for the slowest at every micro step: mean cost of a rank over
the sum of the micro steps' costliest rows, with L + L² / 16,384 as the cost of a sample of L tokens. Times are the least of several runs:
what a planner needs when nothing else runs.
"""

import statistics
import time
from collections.abc import Sequence

from benchmarks import mixes, peers
from benchmarks.measuring import Table

from headrace.trainer.bins import plan_bins, sync_efficiency

EFFICIENCY = 0.98
MILLISECONDS = 5.0
SEEDS = 32


def _largest(plan: Sequence[Sequence[Sequence[int]]], lengths: Sequence[int]) -> int:
    return max(sum(lengths[i] for i in held) for step in plan for held in step)


def _row(name: str, plan: list[list[list[int]]], lengths: list[int], costs: list[float], ms: float) -> list[str]:
    left = len(lengths) - sum(len(held) for step in plan for held in step)
    return [
        name + (f", {left} samples left over" if left else ""),
        str(len(plan)),
        f"{sync_efficiency(plan, costs):.3f}",
        f"{ms:,.1f}",
        f"{_largest(plan, lengths):,}",
    ]


def _timed(lengths: list[int], costs: list[float], rounds: int) -> tuple[list[list[list[int]]], float]:
    """The plan, and the least milliseconds of the rounds."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        plan = plan_bins(lengths, costs, mixes.CAPACITY, mixes.RANKS)
        times.append((time.perf_counter() - start) * 1e3)
    return plan, min(times)


def _ours(mix: str, seed: int, fill: float) -> tuple[bool, float, float]:
    """Whether the fewest micro steps and the cap were kept; efficiency; milliseconds."""
    lengths_I = mixes.lengths(mix, seed, fill)
    lengths, costs = lengths_I.tolist(), mixes.costs(lengths_I).tolist()
    plan, ms = _timed(lengths, costs, 3)
    fewest = -(-sum(lengths) // (mixes.CAPACITY * mixes.RANKS))
    return len(plan) == fewest and _largest(plan, lengths) <= mixes.CAPACITY, sync_efficiency(plan, costs), ms


def run(rounds: int) -> list[Table]:
    """Measure."""
    asked = {mix: mixes.lengths(mix, 0) for mix in mixes.STEPS}
    answers = peers.ask("packing", {**asked, "row": [mixes.CAPACITY, mixes.RANKS]})
    tables = []
    for mix, lengths_I in asked.items():
        lengths, costs = lengths_I.tolist(), mixes.costs(lengths_I).tolist()
        plan, ms = _timed(lengths, costs, rounds)
        rows = [_row("**Headrace**", plan, lengths, costs, ms)]
        rows += [_row(a["name"], a["plans"][mix], lengths, costs, a["ms"][mix]) for a in answers if "missing" not in a]
        efficiency = sync_efficiency(plan, costs)
        reached = efficiency >= EFFICIENCY and len(plan) == mixes.STEPS[mix] and ms < MILLISECONDS
        tables.append(
            Table(
                title=f"Packing: {mix}, 512 samples, rows of 16,384 tokens, 8 ranks",
                command="python benchmarks/run.py packing",
                columns=("planner", "micro steps", "efficiency", "ms", "largest row"),
                rows=rows,
                verdict=f"{len(plan)} micro steps (at least {mixes.STEPS[mix]}), efficiency {efficiency:.3f} (target ≥ {EFFICIENCY}), "
                f"{ms:.1f} ms (target < {MILLISECONDS:g})",
                reached=reached,
                notes="; ".join(f"{a['name']} not measured: {a['missing']}" for a in answers if "missing" in a),
            )
        )
    spread = []
    for mix in mixes.STEPS:
        for fill in (0.95, 0.97, 0.985, 0.995, 0.999):
            found = [_ours(mix, seed, fill) for seed in range(SEEDS)]
            spread.append(
                [
                    mix,
                    f"{fill:.1%}",
                    f"{sum(kept for kept, _, _ in found)} of {SEEDS}",
                    f"{min(e for _, e, _ in found):.3f}",
                    f"{statistics.median(e for _, e, _ in found):.3f}",
                    f"{statistics.median(ms for _, _, ms in found):.1f}",
                    f"{max(ms for _, _, ms in found):.1f}",
                ]
            )
    tables.append(
        Table(
            title=f"Packing: Headrace over {SEEDS} draws of each mix, by how full the rows must be",
            command="python benchmarks/run.py packing",
            columns=("mix", "fill", "fewest micro steps", "least efficiency", "median", "median ms", "most ms"),
            rows=spread,
            verdict=f"least efficiency {min(float(row[3]) for row in spread):.3f}",
            reached=all(float(row[3]) >= EFFICIENCY for row in spread),
        )
    )
    return tables
