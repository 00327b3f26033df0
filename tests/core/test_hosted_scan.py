"""What was compiled reads what the codec reads, bit for bit, or leaves it to the codec; and it reads nothing else's memory."""

import ctypes
import math
import mmap
import random
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from headrace.core import hosted_scan, hosted_scan_build
from headrace.core.hosted_entries import decode_hosted
from headrace.core.hosted_scan import Columns, scan
from headrace.core.hosted_scan_build import NotCompiledError, compile_scan
from headrace.schemas.codec import SampledGroup, decode_group
from headrace.schemas.errors import CodecError

NUMBERS = ["0", "-0", "0.0", "-0.0", "-0e0", "1", "-1", "-1.5e-7", "-1E+2", "-1e400", "1e39", "-1e-400", "3.4028235e38", "3.4028236e38",
           "-1.1920928955078125e-07", "-0.00000000000000000001234567890123456789", "1.00000005960464477539062500000000000000000001",
           "1.000000059604644775390625", "16777217", "123456789012345678901234567890", "-9223372036854775809", "1e-45", "1e-46", "5e-324",
           "NaN", "Infinity", "-Infinity", "null", "true", '"-0.5"', "01", "-", "1.", ".5", "+1", "1e", "1e+",
           "0x1", "- 1", "[]"]  # fmt: skip
TOKENS = ['"token_id:5"', '"token_id:0"', '"token_id:007"', '"token_id:99999999"', '"token_id:999999999"', '"token_id:2147483648"',
          '"token_id:"', '"token_id:-1"', '"token_id:5 "', '"token_id:５"', '"token_id:\\u0035"', '"a"', '"\\""', '"é"', '"\\ud83d\\ude00"',
          "5", "null", '"token_id:5', '"token_id:12345678901"']  # fmt: skip
BYTES = ["[]", "[97]", "[97,98]", "[ 97 , 98 ]", "null", "[97,]", "[,97]", "[097]", "[0]", "[1e2]", "[-1]", "[[1]]", '"abc"', "{}", "[9 7]"]
TOP = ["[]", "[ ]", "null", '[{"token":"a","logprob":-1,"bytes":null}]', "{}", "[null]", "0"]
SPACES = ["", "", "", "", " ", "\n\t", "\r ", "\u00a0", "/**/"]
PIECES = [b"", b"\x00", b"\xff", b"\\", b'"', b"{", b"}", b"[", b"]", b",", b":", b" ", b"\n", b"0", b"9", b"-", b".", b"e", b"null",
          b"{" * 300, b"[" * 300, b'"content":[', b'{"token":"token_id:5"', b'"logprob":-1', b"\xc3\xa9", b"\xed\xa0\x80"]  # fmt: skip


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return compile_scan(tmp_path_factory.mktemp("compiled"))
    except NotCompiledError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def by_compiled(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of the source as it is now, whatever was installed."""
    monkeypatch.setattr(hosted_scan, "library", lambda: compiled)
    hosted_scan._function.cache_clear()
    yield
    hosted_scan._function.cache_clear()


def found(body: bytes) -> Columns:
    columns = scan(body)
    assert columns is not None
    return columns


def refusal_or_group(body: bytes) -> SampledGroup | tuple[object, ...]:
    try:
        return decode_group(body)
    except CodecError as error:
        return error.reason, error.path, error.detail


def drawn_entry(rng: random.Random, odd: float) -> str:
    def one_of(usual: str, others: list[str]) -> str:
        return rng.choice(others) if rng.random() < odd else usual

    def space() -> str:
        return one_of("", SPACES)

    keys = {
        "token": one_of(f'"token_id:{rng.randrange(10 ** rng.randint(1, 7))}"', TOKENS),
        "bytes": one_of(orjson.dumps(list(rng.randbytes(rng.randrange(5)))).decode(), BYTES),
        "logprob": one_of(repr(-rng.expovariate(1) * 10.0 ** -rng.randrange(12)), NUMBERS),
        "top_logprobs": one_of("[]", TOP),
    }
    fields = list(keys.items())
    if rng.random() < odd:
        rng.shuffle(fields)
    if rng.random() < odd:
        fields.pop(rng.randrange(len(fields)))
    if rng.random() < odd:
        fields.append(rng.choice([*fields, ("more", "1"), ("tok\\u0065n", '"token_id:1"'), ("", "{}")]))
    return "{" + ",".join(f'{space()}"{key}"{space()}:{space()}{value}{space()}' for key, value in fields) + "}"


def drawn_body(rng: random.Random, odd: float) -> bytes:
    """A group, each part of it unusual with a probability."""
    members = []
    for i in range(rng.randint(1, 3)):
        space = rng.choice(SPACES) if rng.random() < odd else ""
        entries = f"{space},{space}".join(drawn_entry(rng, odd) for _ in range(rng.randint(0 if odd else 1, 5)))
        logprobs = f'{{"content":{space}[{space}{entries}{space}]{space},"refusal":null}}'
        text = rng.choice(['"a"', '"\\"content\\":[{\\"token\\":\\"token_id:1\\"}]"', '"é\\u00e9\\ud83d\\ude00"', "null"])
        more = rng.choice(["", ',"token_ids":[5]', ',"token_span":null', ',"index":0']) if rng.random() < odd else ',"index":0'
        choice = f'{{"finish_reason":"stop","message":{{"content":{text}}},"logprobs":{logprobs}{more}}}'
        context = rng.choice(
            [
                '{"role":"user","content":"b"}',
                '{"role":"user","content":[{"type":"text","text":"b"}]}',
                f'{{"role":"user","content":"b","metadata":{{"content":[{entries}]}}}}' if odd else '{"role":"user","content":""}',
            ]
        )
        members.append(f'{{"messages_and_choices":[{context},{choice}],"reward":{i}}}')
    return f'{{"trajectories":[{",".join(members)}],"group_id":"g"}}'.encode(errors="surrogatepass")


def assert_alike(body: bytes, seed: object) -> bool:
    """Whether it was read by the scanner."""
    quick = decode_hosted(body)
    if quick is None:
        return False
    slow = refusal_or_group(body)
    assert isinstance(slow, SampledGroup), (seed, slow, body)
    assert quick == slow, (seed, body)
    assert repr(quick.group) == repr(slow.group), (seed, body)
    return True


def test_entries_as_servers_write_them_are_read_by_the_scanner() -> None:
    for seed in range(300):
        assert assert_alike(drawn_body(random.Random(seed), 0), seed)


@pytest.mark.parametrize("odd", [0.01, 0.05, 0.2])
def test_what_is_unusual_is_read_alike_or_left_to_the_codec(odd: float) -> None:
    taken = sum(assert_alike(drawn_body(random.Random(seed), odd), seed) for seed in range(2000))
    assert 5 < taken < 1995


def test_bytes_that_were_changed_are_read_alike_or_left_to_the_codec() -> None:
    taken = 0
    for seed in range(4000):
        rng = random.Random(seed)
        body = bytearray(drawn_body(rng, rng.choice([0, 0.05])))
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(body))
            match rng.randrange(5):
                case 0:
                    body[at] = rng.randrange(256)
                case 1:
                    body[at:at] = rng.choice(PIECES)
                case 2:
                    del body[at : at + rng.randint(1, 8)]
                case 3:
                    body[at:at] = body[at : at + rng.randint(1, 200)]
                case _:
                    body = body[: max(1, at)] if rng.random() < 0.2 else body
        taken += assert_alike(bytes(body), seed)
    assert taken > 50, "a digit that changes leaves it usual"


def number_texts(rng: random.Random) -> Iterator[str]:
    yield from NUMBERS[:24]
    for _ in range(4000):
        double = struct.unpack("<d", rng.randbytes(8))[0]
        single = struct.unpack("<f", rng.randbytes(4))[0]
        # What lies in the middle between two float32, and just beside it.
        middle = (float(np.float32(rng.uniform(0, 20))) + float(np.nextafter(np.float32(rng.uniform(0, 20)), np.float32(99)))) / 2
        yield from (
            repr(value) for value in (double, single, middle, math.nextafter(middle, 0), -rng.expovariate(1)) if math.isfinite(value)
        )
        low = np.float32(rng.uniform(0, 20) * 10.0 ** -rng.randrange(30))
        halfway = (float(low) + float(np.nextafter(low, np.float32(99)))) / 2
        yield from (f"{halfway:.17g}", f"{halfway:.60f}".rstrip("0"), f"{halfway:.40e}", f"{low:.9g}", f"{low:.7f}")
        digits = "".join(rng.choices("0123456789", k=rng.randint(1, 25)))
        power = rng.choice(["", f"e{rng.randint(-50, 30)}", f"E+{rng.randrange(9)}"])
        yield f"-{rng.choice(['0', '3', '12'])}.{'0' * rng.randrange(12)}{digits}{power}"


def test_numbers_are_those_of_a_careful_reader_bit_for_bit() -> None:
    texts = list(number_texts(random.Random(0)))
    kept, expected = [], []
    for text in texts:
        with np.errstate(over="ignore"):
            value = np.float32(float(orjson.loads(text))) if not text.endswith("e400") else np.float32(math.inf)
        if np.isfinite(value):
            kept.append(text)
            expected.append(value)
    read = []
    for first in range(0, len(kept), 1000):
        entries = ",".join(f'{{"token":"token_id:1","logprob":{text}}}' for text in kept[first : first + 1000])
        columns = found(f'"content":[{entries}]'.encode())
        read.append(columns.logprobs)
    bits = np.concatenate(read).view(np.uint32)
    wanted = np.array(expected, np.float32).view(np.uint32)
    assert len(bits) == len(kept) > 30_000
    different = np.flatnonzero(bits != wanted)
    assert [kept[i] for i in different[:5]] == []


def test_numbers_that_no_float32_holds_are_left_to_the_codec() -> None:
    for text in ("1e39", "-3.4028236e38", "1" + "0" * 50):
        with pytest.raises(ValueError):  # noqa: PT011 - no text: the codec says what is wrong
            scan(f'"content":[{{"token":"token_id:1","logprob":{text}}}]'.encode())


# In a process of its own: what reads beyond the last byte ends it.
_GUARDED = """
import ctypes, mmap, random, sys
from tests.core.test_hosted_scan import drawn_body, guarded, hosted_scan, scan, Path
hosted_scan.library = lambda: Path(sys.argv[1])
for seed in range(12):
    body = drawn_body(random.Random(seed), (seed % 3) / 20)
    for size in range(len(body) + 1):
        scan(guarded(body[:size]))
print("alive")
"""
_room: list[tuple[mmap.mmap, int]] = []


def guarded(body: bytes) -> memoryview:
    """A copy that ends where a page begins that nobody may read."""
    if not _room:
        room = mmap.mmap(-1, 5 * mmap.PAGESIZE)
        last = ctypes.addressof(ctypes.c_char.from_buffer(room)) + 4 * mmap.PAGESIZE
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mprotect(ctypes.c_void_p(last), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
        _room.append((room, 4 * mmap.PAGESIZE))
    room, end = _room[0]
    room[end - len(body) : end] = body
    return memoryview(room)[end - len(body) : end]


def test_no_byte_behind_a_body_is_read(compiled: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _GUARDED, str(compiled)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "alive"), done.stderr


def test_an_entry_that_says_a_key_twice_is_left_to_the_codec() -> None:
    twice = b'"content":[{"token":"token_id:1","logprob":0.10000000000000000000001,"logprob":-1}]'
    assert found(twice).turns == []
    assert len(found(twice.replace(b',"logprob":-1', b"")).turns) == 1


def test_more_turns_odd_numbers_and_depth_than_there_is_room_for() -> None:
    one = {"token": "token_id:1", "bytes": [], "logprob": -0.5, "top_logprobs": []}
    odd = b'{"token":"token_id:1","logprob":0.10000000000000000000001}'
    many: list[Any] = [{"content": [one]} for _ in range(70_000)]
    assert len(found(orjson.dumps(many)).turns) == 1 << 16
    assert found(b'{"content":[' + b",".join([odd] * 4096) + b"]}").logprobs.tolist() == [np.float32(0.1)] * 4096
    assert found(b'{"content":[' + b",".join([odd] * 4097) + b"]}").turns == []
    assert found(b'"content":[' * 100_000).turns == []
    assert found(b'"content":[{' * 100_000).turns == []


def test_without_a_compiler_nothing_is_made_and_the_reason_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosted_scan_build.shutil, "which", lambda _name: None)
    with pytest.raises(NotCompiledError, match="no C compiler"):
        compile_scan(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_library_of_another_source_is_taken_away(compiled: Path, tmp_path: Path) -> None:
    (tmp_path / "hosted_scan-0123.so").write_bytes(b"")
    made = compile_scan(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [made.name] == [compiled.name]


def test_where_nothing_is_compiled_numpy_reads_the_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosted_scan, "library", lambda: tmp_path / "none.so")
    body = b" " * 600 + drawn_body(random.Random(1), 0)
    assert scan(body) is None
    assert decode_hosted(body) == decode_group(body)
