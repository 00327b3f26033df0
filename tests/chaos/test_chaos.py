"""A short chaos run: the proof of `make chaos`, on a few dozen steps."""

from pathlib import Path

import pytest
from tests.chaos.__main__ import logs, report
from tests.chaos.run import Options, run

# One of each family; the long run by hand plays them all, many times over.
FAULTS = (
    "worker killed between store and commit",
    "zombie woken between store and commit",
    "broker killed between store and commit",
    "store full for a while",
)


@pytest.mark.slow
@pytest.mark.timeout(600)  # two runs and a broker of its own: about 80 s on a quiet machine
async def test_what_is_trained_under_faults_is_what_an_undisturbed_run_trains_bit_for_bit(tmp_path: Path) -> None:
    options = Options(folder=tmp_path, steps=40, seed=1, every=5, faults=FAULTS, warm=True)
    outcome = await run(options, print)
    report(outcome)
    assert outcome.verdict.problems == (), logs(tmp_path)
    assert (outcome.verdict.lost, outcome.verdict.duplicated, outcome.steps) == (0, 0, 40)
    assert outcome.faults.total() >= 1  # how many there is time for is a matter of the machine
    assert outcome.in_gap.total() >= 1
