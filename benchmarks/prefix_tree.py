"""Building the prefix trees of a batch of groups: ours next to TRL's and AReaL's, on the same token ids.

Rates are tokens of the sequences (shared ones counted for each) over wall time. Ours is measured to the end that the peers reach: the
unique tokens, their positions, the segments, and for every sequence the column of each of its tokens. AReaL's function also makes a
dense mask to count positions with, which is most of its time (of 15.5 s for the first case, its tries took 0.5 s). Ours is the median
of the rounds; the peers, which take seconds, ran once.
"""

import statistics
import time

import numpy as np
import numpy.typing as npt
from benchmarks import peers
from benchmarks.measuring import Table

from headrace.trainer.packing import MIN_SHARED
from headrace.trainer.prefix_tree import build_tree

TARGET = 50.0
CASES = {
    "8 groups of 8, prompt 1,024, answers about 1,050": (8, 8, 1024, 1050),
    "8 groups of 8, prompt 4,096, answers about 490": (8, 8, 4096, 490),
    "8 groups of 16, prompt 6,000, answers about 260": (8, 16, 6000, 260),
}

Groups = list[list[npt.NDArray[np.int32]]]


def _groups(groups: int, size: int, prompt: int, answer: int) -> Groups:
    rng = np.random.default_rng(0)

    def tokens(n: int) -> npt.NDArray[np.int32]:
        return rng.integers(0, 150_000, n).astype(np.int32)

    made = []
    for _ in range(groups):
        stem = tokens(prompt)
        made.append([np.concatenate([stem, tokens(int(n))]) for n in rng.integers(answer // 2, answer * 3 // 2, size)])
    return made


def _seconds(groups: Groups) -> tuple[float, float, int]:
    """Of the trees alone, of the trees with all columns, and unique tokens."""
    start = time.perf_counter()
    trees = [build_tree(group, MIN_SHARED) for group in groups]
    built = time.perf_counter() - start
    for tree, group in zip(trees, groups, strict=True):
        for sequence in range(len(group)):
            tree.columns(sequence)
    return built, time.perf_counter() - start, sum(map(len, trees))


def run(rounds: int) -> list[Table]:
    """Measure."""
    cases = {name: _groups(*case) for name, case in CASES.items()}
    asked = {}
    for name, groups in cases.items():
        asked[name] = np.concatenate([ids for group in groups for ids in group])
        asked[f"{name}/lengths"] = np.array([[len(ids) for ids in group] for group in groups])
    answers = peers.ask("prefix_tree", asked)
    tables = []
    for name, groups in cases.items():
        total = sum(len(ids) for group in groups for ids in group)
        measured = [_seconds(groups) for _ in range(rounds)]
        rate = total / statistics.median(whole for _, whole, _ in measured) / 1e6
        alone = total / statistics.median(built for built, _, _ in measured) / 1e6
        unique = measured[0][2]
        rows = [["**Headrace**", f"{rate:,.1f}", "", f"{unique:,}"], ["Headrace, tree without columns", f"{alone:,.1f}", "", f"{unique:,}"]]
        for answer in answers:
            if "missing" not in answer:
                theirs = total / answer["seconds"][name] / 1e6
                rows.append([answer["name"], f"{theirs:,.3f}", f"{rate / theirs:,.0f}", f"{answer['tokens'][name]:,}"])
        tables.append(
            Table(
                title=f"Prefix tree: {name}",
                command="python benchmarks/run.py prefix_tree",
                columns=("builder", "million tokens/s", "ours over it", "tokens in the tree"),
                rows=rows,
                verdict=f"{total:,} tokens, {unique:,} unique: {rate:,.1f} million tokens/s, target ≥ {TARGET:g}",
                reached=rate >= TARGET,
                notes="; ".join(f"{a['name']} not measured: {a['missing']}" for a in answers if "missing" in a),
            )
        )
    return tables
