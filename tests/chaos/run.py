"""A chaos run from beginning to end: the stream undisturbed, the same stream under faults, and the judgement.

Guarantees: whatever happens, no process of the run is left. Limitations: Windows and macOS (it reads `/proc`).
"""

import asyncio
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from tests.chaos.adversary import Adversary, Ground
from tests.chaos.crew import Crew
from tests.chaos.facts import Facts, gather
from tests.chaos.site import StreamWriter, prepare, settings_of
from tests.chaos.stream import JOB, Entry, Stream, write
from tests.chaos.verdict import Verdict, expected_of, judge
from tests.chaos.witness import Place, Seen, Witness
from tests.consumers.tiny_model import save_tiny_model
from tests.s3_proxy import S3Proxy

from headrace.core.local import LocalBroker, LocalS3
from headrace.core.local.broker import QUICK_RESTART
from headrace.core.settings import Settings
from headrace.core.store import open_store
from headrace.schemas.events import GroupRejected
from headrace.schemas.state import StepRecord

_STALL_SECONDS = 120.0
_ENDED = 10
"""Workers that may end by themselves before the run is dropped (one that starts while the broker is away does)."""
_BUCKET = "chaos"
_AHEAD = 120
"""Records that are written ahead of the steps, so that producers write while faults happen."""


class StalledError(Exception):
    """A run does not continue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to run."""

    folder: Path
    steps: int = 1000
    seed: int = 0
    workers: int = 2
    every: float = 8.0
    """Steps between two faults, on average."""
    snapshot_every: int = 4
    faults: tuple[str, ...] | None = None
    """Only these; None: all there are."""
    warm: bool = False
    """Workers without the seconds of their imports; see `warm`."""
    sabotage: str | None = None
    s3: bool = False
    """The store is a real S3 server behind a proxy, not a folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run came to."""

    verdict: Verdict
    faults: Counter[str]
    in_gap: Counter[str]
    """Blows that fell between store and commit."""
    in_transaction: int
    """Of those, how many left an open transaction, whose records no subscriber sees."""
    steps: int
    records: int
    aborted: int
    """Records that no `read_committed` subscriber ever sees."""
    exits: tuple[str, ...]
    """Workers that ended by themselves."""
    seconds: float


async def run(options: Options, say: Callable[[str], None]) -> Outcome:
    """Run all of it.

    Raises:
        StalledError: no step for two minutes.
    """
    stream = write(options.steps, options.seed)
    options.folder.mkdir(parents=True, exist_ok=True)
    base = await asyncio.to_thread(save_tiny_model, options.folder / "base")
    overrides = QUICK_RESTART | {"group.min.session.timeout.ms": "1000", "log.retention.check.interval.ms": "3600000"}
    broker = LocalBroker(options.folder / "broker", overrides=overrides)
    await asyncio.to_thread(broker.start)
    with _s3(options) as proxy:
        try:
            servers = broker.bootstrap_servers
            s3 = None if proxy is None else (_BUCKET, proxy.settings)

            def settings(name: str) -> Settings:
                return settings_of(servers, name, options.folder, base, snapshot_every=options.snapshot_every, s3=s3)

            calm, places = await _calm(settings("calm"), stream, options, say)
            ground = Ground(broker=broker, s3=proxy)
            return await _storm(settings("storm"), stream, options, ground=ground, calm=calm, expected=places, say=say)
        finally:
            await asyncio.to_thread(broker.stop)


@contextmanager
def _s3(options: Options) -> Iterator[S3Proxy | None]:
    """The S3 server of a run that has one, behind a proxy."""
    if not options.s3:
        yield None
        return
    with LocalS3(options.folder / "s3", bucket=_BUCKET) as server, S3Proxy.of(server) as proxy:
        yield proxy


async def _calm(
    settings: Settings, stream: Stream, options: Options, say: Callable[[str], None]
) -> tuple[Facts, dict[tuple[int, int], Entry]]:
    began = time.monotonic()
    await prepare(settings, stream)
    crew = Crew(settings, 1, options.folder / "calm" / "logs", warm=options.warm)
    try:
        async with Witness(settings) as witness, StreamWriter(settings) as writer:
            await writer.write(stream.entries)
            await _until_done(stream, writer, witness, crew)
            codes = await crew.end()
            await witness.catch_up()
    finally:
        crew.kill_all()
    facts = gather(settings, writer.places, witness)
    problems = expected_of(writer.places, facts)
    if problems or codes != [0]:
        raise StalledError(f"the undisturbed run is not as the stream says (exit codes {codes}): " + "; ".join(problems[:5]))
    say(f"undisturbed: {sum(stream.steps.values())} steps, {len(stream.entries)} records, {time.monotonic() - began:.0f} s")
    return facts, writer.places


async def _storm(
    settings: Settings,
    stream: Stream,
    options: Options,
    *,
    ground: Ground,
    calm: Facts,
    expected: dict[tuple[int, int], Entry],
    say: Callable[[str], None],
) -> Outcome:
    began = time.monotonic()
    await prepare(settings, stream)
    crew = Crew(settings, options.workers, options.folder / "storm" / "logs", warm=options.warm, sabotage=options.sabotage)
    tasks: list[asyncio.Task[None]] = []
    try:
        async with Witness(settings) as witness, StreamWriter(settings) as writer:

            def tell(line: str) -> None:
                done = len(witness.of(StepRecord))
                say(f"{time.monotonic() - began:7.1f} s  step {done:4d} of {options.steps}  {line}")

            rng = random.Random(options.seed)
            adversary = Adversary(settings, crew, ground, committed=witness, rng=rng, say=tell, only=options.faults)
            tasks = [
                asyncio.create_task(crew.keep()),
                asyncio.create_task(_write_ahead(stream, writer, witness)),
                asyncio.create_task(_disturb(adversary, witness, options, rng)),
            ]
            await _until_done(stream, writer, witness, crew, tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            codes = await crew.end()
            # One that is told to end before it has begun ends by the signal.
            codes = [code for worker, code in zip(crew.workers, codes, strict=True) if worker.log.stat().st_size]
            await witness.catch_up()
        async with Witness(settings) as again, Witness(settings, "read_uncommitted") as everything:
            await again.catch_up()
            await everything.catch_up()
    finally:
        for task in tasks:
            task.cancel()
        crew.kill_all()
    problems = [f"a worker ended with code {code} after SIGTERM" for code in codes if code != 0]
    if writer.places != expected:
        problems.append("the two runs were not given the same records: nothing can be compared")
    states = settings.topic_names.models  # compacted within minutes: what it held is not what it holds
    live, now, written = ({place: seen for place, seen in one.seen.items() if place[0] != states} for one in (witness, again, everything))
    if now != live:
        problems.append(_difference(live, now))
    facts = gather(settings, writer.places, witness)
    verdict = judge(stream, writer.places, calm, facts, open_store(settings.store.url, settings.s3))
    ledger = {record.attempt for record in witness.of(StepRecord)}
    begun = {record.attempt for record in everything.of(StepRecord)}
    return Outcome(
        verdict=Verdict(problems=(*problems, *verdict.problems), lost=verdict.lost, duplicated=verdict.duplicated),
        faults=adversary.counts,
        in_transaction=sum(attempt in begun and attempt not in ledger for _, attempt in adversary.gaps),
        in_gap=Counter(name for name, attempt in adversary.gaps if attempt not in ledger),
        steps=len(witness.of(StepRecord)),
        records=len(writer.places),
        aborted=len(written.keys() - live.keys()),
        exits=tuple(f"{worker.log.name}: code {worker.exitcode}" for worker in crew.ended),
        seconds=time.monotonic() - began,
    )


def _difference(live: Mapping[Place, Seen], now: Mapping[Place, Seen]) -> str:
    """What a live subscriber saw, and what is there at the end."""
    gone, new = sorted(live.keys() - now.keys()), sorted(now.keys() - live.keys())
    changed = [place for place in live.keys() & now.keys() if live[place] != now[place]]
    first = (gone or new or changed)[0]
    return f"subscribers saw {len(gone)} records that are gone, missed {len(new)}, and {len(changed)} have changed; first {first}"


async def _write_ahead(stream: Stream, writer: StreamWriter, witness: Witness) -> None:
    """Write the stream so far ahead of the steps, and no further."""
    rest: Iterator[Entry] = iter(stream.entries)
    per_step = len(stream.entries) / max(1, sum(stream.steps.values()))
    while chunk := list(islice(rest, 20)):
        written = len(writer.places)
        await witness.until(lambda at=written: len(witness.of(StepRecord)) * per_step + _AHEAD > at, _STALL_SECONDS)
        await writer.write(chunk)


async def _disturb(adversary: Adversary, witness: Witness, options: Options, rng: random.Random) -> None:
    while True:
        at = len(witness.of(StepRecord)) + int(rng.expovariate(1 / options.every))
        await witness.until(lambda goal=at: len(witness.of(StepRecord)) >= goal, _STALL_SECONDS)
        await adversary.strike()


async def _until_done(stream: Stream, writer: StreamWriter, witness: Witness, crew: Crew, tasks: Sequence[asyncio.Task[None]] = ()) -> None:
    """Wait until every step is committed and every record has its fate."""
    steps = sum(stream.steps.values())
    outcomes = sum(entry.expected != JOB for entry in stream.entries)

    def done() -> bool:
        if len(crew.ended) > _ENDED or not (tasks or crew.running):
            raise StalledError(f"{len(crew.ended) or 'all'} workers ended by themselves")
        for task in tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error
        letters = sum(seen.record is None for seen in witness.seen.values())
        groups = sum(record.groups for record in witness.of(StepRecord)) + len(witness.of(GroupRejected))
        return len(witness.of(StepRecord)) >= steps and groups + letters >= outcomes

    if not await witness.until(done, _STALL_SECONDS):
        at = {record.model_id: record.step for record in witness.of(StepRecord)}
        raise StalledError(
            f"nothing was committed for {_STALL_SECONDS:.0f} s; steps {at} of {stream.steps}, {len(writer.places)} records written"
        )


def clean(folder: Path) -> None:
    """Remove a run's folder."""
    shutil.rmtree(folder, ignore_errors=True)
