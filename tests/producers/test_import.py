"""Importing the producer is cheap and pulls in nothing of the trainer."""

import subprocess
import sys
import time

RUNS = 5


def seconds(code: str) -> float:
    """Best of several runs: what it costs on a machine that is not busy with something else."""
    best = float("inf")
    for _ in range(RUNS):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        best = min(best, time.perf_counter() - start)
    return best


def test_import_takes_less_than_half_a_second():
    assert seconds("import headrace.producers") - seconds("pass") < 0.5


def test_neither_the_import_nor_the_use_of_any_name_loads_torch_or_faststream():
    code = (
        "import sys, headrace.producers as p\n"
        "light = {'aiokafka', 'pydantic'} & set(sys.modules)\n"
        "assert not light, light\n"
        "[getattr(p, name) for name in p.__all__]\n"
        "heavy = {'torch', 'faststream', 'fastapi', 'transformers', 'boto3'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_is_there_and_others_are_not():
    code = (
        "import headrace.producers as p\ntry: p.nothing\nexcept AttributeError as e: assert 'nothing' in str(e)\nelse: raise SystemExit(1)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
