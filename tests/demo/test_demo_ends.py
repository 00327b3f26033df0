"""However the demo ends, at whatever moment, no process of it is left, by pid."""

import signal
from pathlib import Path

import pytest
from tests.demo.running import RunningDemo

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

START = "Starting Kafka"
LOADING = "worker and agents load torch"
TRAINING = "step 1/"


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        (START, signal.SIGINT),
        (START, signal.SIGTERM),
        (LOADING, signal.SIGTERM),
        (LOADING, signal.SIGINT),
        (TRAINING, signal.SIGINT),
    ],
)
def test_an_interrupt_leaves_no_process_and_no_file(tmp_path: Path, moment: str, number: signal.Signals):
    demo = RunningDemo(tmp=tmp_path)
    try:
        demo.wait_for_line(moment, seconds=250)
        demo.send(number)
        assert demo.end(40) == 130, "".join(demo.output)
        assert demo.seen
        assert not demo.survivors(0)
        assert not list(demo.files.iterdir())
        assert "Traceback" not in "".join(demo.output)
    finally:
        demo.close()


@pytest.mark.parametrize("moment", [START, LOADING])
def test_killing_the_demo_itself_leaves_no_process(tmp_path: Path, moment: str):
    demo = RunningDemo(tmp=tmp_path)
    try:
        demo.wait_for_line(moment)
        demo.send(signal.SIGKILL)
        demo.end()
        assert not demo.survivors(30)
    finally:
        demo.close()


def test_a_process_that_dies_ends_the_demo_with_its_last_words(tmp_path: Path):
    demo = RunningDemo(tmp=tmp_path)
    try:
        demo.wait_for_line(LOADING)
        demo.find("headrace.demo.agent").kill()
        assert demo.end(60) == 1
        assert "was ended by signal 9" in "".join(demo.output)
        assert not demo.survivors(0)
    finally:
        demo.close()
