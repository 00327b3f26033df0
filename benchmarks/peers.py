"""The planners of other trainers, run in a Python environment of their own.

Their pins contradict each other and ours (in the versions measured: areal 1.0.4 wants transformers <= 5.3, verl 0.9.1 >= 5.5.3,
skyrl 0.4.0 >= 5.6.1, and areal a numpy below 2), so no one resolution holds them all and they are no extra of Headrace. They live
next to it, without their dependencies, next to the few packages that their planners import. Python 3.12, because skyrl needs it:

    uv venv --python 3.12 .venv-peers
    uv pip install --python .venv-peers/bin/python --no-deps -r benchmarks/peers.txt
    uv pip install --python .venv-peers/bin/python -r benchmarks/peers-imports.txt
    HEADRACE_BENCH_PEERS=.venv-peers/bin/python make bench ARGS='packing prefix_tree'

This file is both sides: the benchmarks call `ask`, which runs the file under that interpreter. A peer that can't be imported is
named with the reason and left out. What is theirs: the packing, and for verl and trl the ranks too. Ours: dealing the bins of areal
and skyrl to ranks in the order in which they come. Times are the least of seven runs, or of as
many as take a second, after a warm-up; verl's contains the selection of the samples' tensors, which it does in the same function.
"""
# ruff: noqa: PLC0415 - each peer is imported where it is asked, because any may be missing

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.npyio import NpzFile

INTERPRETER = os.environ.get("HEADRACE_BENCH_PEERS")

Plan = list[list[list[int]]]


def ask(question: str, arrays: dict[str, Any]) -> list[dict[str, Any]]:
    """The answers of the peers to `packing` or `prefix_tree`; none without HEADRACE_BENCH_PEERS."""
    if INTERPRETER is None:
        return []
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder) / "asked.npz", Path(folder) / "answered.json"
        np.savez(asked, **arrays)
        # -P: this folder's modules must not stand before the peers'. Peers talk on standard output and error while they start; what went
        # wrong in one of them is in its answer.
        subprocess.run([INTERPRETER, "-P", __file__, question, str(asked), str(answered)], check=True, capture_output=True)
        answers: list[dict[str, Any]] = json.loads(answered.read_text())
        return answers


def _deal(bins: list[list[int]], ranks: int) -> Plan:
    dealt = [list(map(int, held)) for held in bins]
    dealt += [[]] * (-len(dealt) % ranks)
    return [dealt[at : at + ranks] for at in range(0, len(dealt), ranks)]


def _areal_ffd(lengths: list[int], capacity: int, ranks: int) -> Plan:
    from areal.utils.seqpack import ffd_allocate

    return _deal(ffd_allocate(lengths, capacity, ranks, ranks), ranks)


def _areal_kk(lengths: list[int], capacity: int, ranks: int) -> Plan:
    from areal.utils.seqpack import kk_allocate

    return _deal(kk_allocate(lengths, capacity, ranks, ranks), ranks)


def _skyrl(name: str) -> Callable[[list[int], int, int], Plan]:
    def pack(lengths: list[int], capacity: int, ranks: int) -> Plan:
        from skyrl.train.dataset.bin_packing import make_seq_packer

        return _deal(make_seq_packer(name, capacity, bin_count_multiple=ranks).pack(lengths), ranks)

    return pack


def _verl(lengths: list[int], capacity: int, ranks: int) -> Plan:
    """As its trainer does: samples to ranks, then each rank's to micro batches; all ranks take the largest number of those."""
    import torch
    from tensordict import TensorDict
    from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions, rearrange_micro_batches

    work = calculate_workload(torch.tensor(lengths)).tolist()
    of_ranks = get_seqlen_balanced_partitions(work, k_partitions=ranks, equal_size=True)
    batches = []
    for members in of_ranks:
        own = torch.tensor([lengths[i] for i in members])
        mask = (torch.arange(int(own.max()))[None, :] < own[:, None]).to(torch.int64)
        batches.append(TensorDict({"input_ids": mask, "attention_mask": mask}, batch_size=len(members)))
    steps = None
    while True:
        found = [rearrange_micro_batches(batch, capacity, min_num_micro_batch=steps)[1] for batch in batches]
        most = max(len(micro) for micro in found)
        if all(len(micro) == most for micro in found):
            break
        steps = most
    return [[[of_ranks[r][i] for i in found[r][s]] for r in range(ranks)] for s in range(most)]


def _trl(lengths: list[int], capacity: int, ranks: int) -> Plan:
    """A streaming planner: what stands in the open micro batch at the end of a finite stream is not given out."""
    import torch
    from trl.experimental.async_grpo.async_grpo_trainer import TokenBudgetBatcher

    ends = np.cumsum(lengths)
    samples = [
        {"input_ids": torch.arange(end - n, end), "completion_mask": torch.ones(n, dtype=torch.long), "group_id": i, "at": i}
        for i, (n, end) in enumerate(zip(lengths, ends.tolist(), strict=True))
    ]
    return [[[s["at"] for s in row.samples] for row in rows] for rows in TokenBudgetBatcher(samples, ranks, capacity, {})]


PACKERS: dict[str, tuple[str, Callable[[list[int], int, int], Plan]]] = {
    "AReaL ffd": ("areal", _areal_ffd),
    "AReaL kk": ("areal", _areal_kk),
    "verl": ("verl", _verl),
    "SkyRL first fit decreasing": ("skyrl", _skyrl("first_fit_decreasing")),
    "SkyRL balanced": ("skyrl", _skyrl("balanced")),
    "TRL token budget": ("trl", _trl),
}


def _trl_tree(groups: list[list[Any]]) -> int:
    import torch
    from trl.experimental.async_grpo.packing import TreeRow

    tokens = 0
    for group in groups:
        row = TreeRow()
        for ids in group:
            n = len(ids)
            row.add(
                {
                    "input_ids": torch.from_numpy(ids),
                    "completion_mask": torch.zeros(n, dtype=torch.long),
                    "old_log_probs": torch.zeros(n),
                    "advantage": 0.0,
                    "group_id": 0,
                }
            )
        tokens += len(row.pack()["input_ids"])
    return tokens


def _areal_tree(groups: list[list[Any]]) -> int:
    import torch
    from areal.api.cli_args import MicroBatchSpec
    from areal.models.tree_attn.tree import build_packed_tree_batch

    sequences = [ids for group in groups for ids in group]
    shape = (len(sequences), max(map(len, sequences)))
    input_ids, mask = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.bool)
    for row, ids in enumerate(sequences):
        input_ids[row, : len(ids)] = torch.from_numpy(ids)
        mask[row, : len(ids)] = True
    batch = build_packed_tree_batch({"input_ids": input_ids, "attention_mask": mask}, MicroBatchSpec(max_tokens_per_mb=16_384))
    return int(sum(batch.group_lens))


TREES: dict[str, tuple[str, Callable[[list[list[Any]]], int]]] = {
    "TRL TreeRow add and pack": ("trl", _trl_tree),
    "AReaL build_packed_tree_batch": ("areal", _areal_tree),
}


def _named(name: str, package: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return {"name": f"{name} ({package} {version(package)})", **measure()}
    except Exception as broken:  # noqa: BLE001 - whatever a peer raises is its answer
        return {"name": name, "missing": f"{type(broken).__name__}: {broken}"}


def _packing(asked: NpzFile) -> list[dict[str, Any]]:
    capacity, ranks = (int(n) for n in asked["row"])

    def measured(pack: Callable[[list[int], int, int], Plan]) -> dict[str, Any]:
        found: dict[str, Any] = {"plans": {}, "ms": {}}
        pack(asked["lognormal"].tolist()[:64], capacity, ranks)  # numba compiles
        for mix in asked.files:
            if mix != "row":
                lengths = asked[mix].tolist()
                times: list[float] = []
                while not times or (sum(times) < 1 and len(times) < 7):
                    start = time.perf_counter()
                    found["plans"][mix] = pack(lengths, capacity, ranks)
                    times.append(time.perf_counter() - start)
                found["ms"][mix] = min(times) * 1e3
        return found

    return [_named(name, package, lambda pack=pack: measured(pack)) for name, (package, pack) in PACKERS.items()]


def _trees(asked: NpzFile) -> list[dict[str, Any]]:
    cases = {}
    for case in asked.files:
        if not case.endswith("/lengths"):
            lengths = asked[f"{case}/lengths"]
            pieces = np.split(asked[case], np.cumsum(lengths.ravel())[:-1])
            per_group = lengths.shape[1]
            cases[case] = [pieces[at : at + per_group] for at in range(0, len(pieces), per_group)]

    def measured(build: Callable[[list[list[Any]]], int]) -> dict[str, Any]:
        found: dict[str, Any] = {"seconds": {}, "tokens": {}}
        build([[ids[:128] for ids in group] for group in next(iter(cases.values()))[:1]])
        for case, groups in cases.items():
            start = time.perf_counter()
            found["tokens"][case] = build(groups)
            found["seconds"][case] = time.perf_counter() - start
        return found

    return [_named(name, package, lambda build=build: measured(build)) for name, (package, build) in TREES.items()]


if __name__ == "__main__":
    _, question, asked_path, answered_path = sys.argv
    answers = {"packing": _packing, "prefix_tree": _trees}[question](np.load(asked_path))
    Path(answered_path).write_text(json.dumps(answers))
