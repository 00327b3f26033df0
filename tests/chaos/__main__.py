"""`make chaos`: is every step committed once, whatever is killed? See docs/exactly-once.md.

Exit code 0: lost 0, duplicated 0, and all bits equal to those of an undisturbed run; 1: the first difference is printed, and the logs stay.
"""

import argparse
import asyncio
import logging
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from tests.chaos.run import Options, Outcome, StalledError, clean, run

_LOG_LINES = 15


def main() -> int:
    """Run, print, and say by the exit code."""
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--steps", type=int, default=1000, help="steps of all models together (default 1000)")
    parser.add_argument("--seed", type=int, default=0, help="of the stream and of the faults (default 0)")
    parser.add_argument("--workers", type=int, default=2, help="worker processes (default 2)")
    parser.add_argument("--every", type=float, default=8.0, help="steps between two faults on average (default 8)")
    parser.add_argument("--snapshot-every", type=int, default=4, help="as worker.snapshot_every (default 4)")
    parser.add_argument("--warm", action="store_true", help="fork workers from a process that has imported everything: more kills a minute")
    parser.add_argument("--only", action="append", metavar="FAULT", help="play only this fault, by its name in the report; repeatable")
    parser.add_argument("--sabotage", help="break a guarantee on purpose, to see that the checks find it; see tests/chaos/sabotage.py")
    parser.add_argument("--store", choices=["file", "s3", "both"], default="both", help="both: all steps in a folder, then a tenth in S3")
    parser.add_argument("--folder", type=Path, help="keep everything here")
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="headrace-chaos-"))
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # a broker that is away is no news here
    options = Options(
        folder=folder.absolute() / "file",
        steps=given.steps,
        seed=given.seed,
        workers=given.workers,
        every=given.every,
        snapshot_every=given.snapshot_every,
        warm=given.warm,
        faults=given.only,
        sabotage=given.sabotage,
    )
    in_s3 = replace(options, folder=folder.absolute() / "s3", s3=True)
    runs = {"file": [options], "s3": [in_s3], "both": [options, replace(in_s3, steps=max(20, given.steps // 10))]}[given.store]
    if not all(_passes(each) for each in runs):
        return 1
    if given.folder is None:
        clean(folder)
    return 0


def _passes(options: Options) -> bool:
    _say(f"store: {'S3' if options.s3 else 'a folder'}")
    try:
        outcome = asyncio.run(run(options, _say))
    except StalledError as error:
        _say(f"FAILED: {error}")
        _say(logs(options.folder))
        return False
    report(outcome)
    if outcome.verdict.problems:
        _say(logs(options.folder))
        return False
    return True


def report(outcome: Outcome) -> None:
    """Print what a run came to."""
    for name, count in sorted(outcome.faults.items()):
        _say(f"{count:5d}  {name}")
    gaps = outcome.in_gap
    _say(f"{gaps['killed']:5d}  kills and {gaps['zombie']} wake-ups that fell between store and commit, by the ledger")
    _say(f"{outcome.in_transaction:5d}  of those that fell into an open transaction")
    _say(f"{outcome.aborted:5d}  aborted records that no read_committed subscriber saw")
    for line in outcome.exits:
        _say(f"ended by itself: {line}")
    verdict = outcome.verdict
    for line in verdict.problems[:20]:
        _say(f"PROBLEM  {line}")
    _say(
        f"{outcome.steps} steps, {outcome.records} records, {sum(outcome.faults.values())} faults, {outcome.seconds:.0f} s: "
        f"lost {verdict.lost}, duplicated {verdict.duplicated}"
        + (f"; FAILED: {verdict.problems[0]}" if verdict.problems else ", equal to the undisturbed run bit for bit")
    )


def logs(folder: Path) -> str:
    """The ends of the workers' logs, and where all of them are."""
    lines = [f"logs of all workers: {folder}/*/logs"]
    for log in sorted(folder.glob("*/logs/*.log"), key=lambda path: path.stat().st_mtime)[-3:]:
        lines.append(f"--- {log.name}")
        lines.extend(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
    return "\n".join(lines)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
