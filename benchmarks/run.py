"""Run the benchmarks, print the ratios, write benchmarks/RESULTS.md.

Ratios are of two sides measured in turns in one run; they are printed, not asserted: machines differ.
Usage: `make bench`, or `python benchmarks/run.py [NAME...] [--rounds N]`; the peers that some compare with: `benchmarks/peers.py`.
"""

import argparse
import os
import platform
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import codec, gateway, ingest, memory, overhead, packing, prefix_tree, produce, recovery, sharing  # noqa: E402 - a script has its own folder on the path, not the repository's
from benchmarks.measuring import Comparison, Table  # noqa: E402 - as above

RESULTS = ROOT / "benchmarks" / "RESULTS.md"
BENCHMARKS: dict[str, Callable[[int], Sequence[Comparison | Table]]] = {
    "codec": codec.run,
    "gateway": gateway.run,
    "ingest": ingest.run,
    "memory": memory.run,
    "overhead": overhead.run,
    "packing": packing.run,
    "prefix_tree": prefix_tree.run,
    "produce": produce.run,
    "recovery": recovery.run,
    "sharing": sharing.run,
}


def machine() -> str:
    """What the numbers depend on."""
    model = next((line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")), platform.processor())
    packages = ", ".join(f"{name} {version(name)}" for name in ("aiokafka", "cramjam", "orjson", "pydantic"))
    return f"{model or platform.machine()}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}, {packages}"


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def main() -> None:
    """Run what the command line names; everything unless it names something."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}; all unless given")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(BENCHMARKS)
    if unknown:
        parser.error(f"no benchmark named {', '.join(sorted(unknown))}: there are {', '.join(BENCHMARKS)}")
    results: list[Comparison | Table] = []
    busy = os.getloadavg()[0]  # by others: near or above the number of cores, the side with more threads loses most
    for name in arguments.names or BENCHMARKS:
        for comparison in BENCHMARKS[name](arguments.rounds):
            print(comparison.line(), flush=True)
            results.append(comparison)
    if not arguments.names:
        when = f"{datetime.now(UTC):%Y-%m-%d}, load average at the start {busy:.1f}"
        head = f"# Benchmark results\n\nMade by `make bench`, {when}, on {machine()}.\n\n"
        RESULTS.write_text(head + "\n".join(comparison.markdown() for comparison in results))
        print(f"written: {RESULTS.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
