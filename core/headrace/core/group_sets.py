"""Sets of groups in the object store that belong to no lane: what a job is evaluated on.

One zstd object, one group's JSON a line, named by the SHA-256 of what is stored. Guarantees: the object is durable when `store_groups`
returns, and a repeat is the same object; `read_groups` checks size and digest before it decompresses, and makes no more than `raw_size`
bytes. Limitations: sets above 256 MiB of JSON; deleting them, they live as long as the bucket's lifecycle says. Blocks and computes: not
for an event loop.
"""

import hashlib
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import cramjam

from headrace.core.payloads import MAX_RAW_BYTES, ZSTD_LEVEL, PayloadTooLargeError, PayloadUnreadableError, redeem
from headrace.core.store.interface import ObjectStore
from headrace.schemas.codec import SampledGroup, decode_group, encode_json, sampled
from headrace.schemas.jobs import GroupSet
from headrace.schemas.reasons import CodecError, DeadLetterReason
from headrace.schemas.trajectory import NO_REWARD, TrajectoryGroup


def store_groups(store: ObjectStore, groups: Iterable[TrajectoryGroup | SampledGroup]) -> GroupSet:
    """Store groups, read one by one, as a set.

    Args:
        store: Where to.
        groups: At least one.

    Raises:
        ValueError: there are none.
        CodecError: a group can't be written.
        PayloadTooLargeError: all together have more than 256 MiB of JSON.
        StoreUnavailableError: the store, or the local disk.
    """
    digest, raw_size, count = hashlib.sha256(), 0, 0
    packer = cramjam.zstd.Compressor(level=ZSTD_LEVEL)
    with tempfile.TemporaryDirectory(prefix="headrace-groups-") as folder:
        path = Path(folder, "groups.zst")
        with path.open("wb") as file:

            def put(packed: bytes) -> None:
                digest.update(packed)
                file.write(packed)

            for group in groups:
                for i in (group.group if isinstance(group, SampledGroup) else group).without_reward():
                    raise CodecError(DeadLetterReason.INVALID_SCHEMA, f"trajectories[{i}].reward", NO_REWARD)
                line = encode_json(group if isinstance(group, SampledGroup) else sampled(group)) + b"\n"
                raw_size, count = raw_size + len(line), count + 1
                if raw_size > MAX_RAW_BYTES:
                    raise PayloadTooLargeError(f"the set has more than {MAX_RAW_BYTES} bytes with its group {count}: take fewer groups")
                packer.compress(line)
                put(bytes(packer.flush()))
            put(bytes(packer.finish()))
            size = file.tell()
        if not count:
            raise ValueError("a set has at least one group")
        sha256 = digest.hexdigest()
        key = f"group-sets/{sha256[:2]}/{sha256}.jsonl.zst"
        store.put_file_if_absent(key, path, sha256=sha256)
    return GroupSet(uri=store.uri(key), sha256=sha256, size=size, raw_size=raw_size, groups=count)


def read_lines(store: ObjectStore, stored: GroupSet) -> list[bytes]:
    """The JSON of each group of a set. Raises as `read_groups`, but looks at no group."""
    lines = redeem(store, stored).tobytes().splitlines()
    if len(lines) != stored.groups:
        raise PayloadUnreadableError(f"{stored.uri} has {len(lines)} groups, {stored.groups} are named")
    return lines


def read_groups(store: ObjectStore, stored: GroupSet) -> Iterator[SampledGroup]:
    """The groups of a set, in the order they were stored.

    Raises:
        PayloadError: the set is gone, or is not what was stored; it says where.
        StoreUnavailableError: the store could not answer.
    """
    for number, line in enumerate(read_lines(store, stored), start=1):
        try:
            yield decode_group(line)
        except CodecError as error:
            raise PayloadUnreadableError(f"{stored.uri} line {number} is no group: {error}") from error
