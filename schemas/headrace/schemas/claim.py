"""The claim check: what stands in the log for a group that is too large to stand there itself.

The payload goes to the object store first, zstd-compressed, under its SHA-256; then this message. A reader checks the digest of the
stored bytes before it decompresses them, and the size before and after.
"""

from pydantic import Field

from headrace.schemas.base import Record

INLINE_LIMIT = 256 * 1024
"""Bytes of an encoded group above which it becomes a claim, unless set otherwise."""


class GroupClaim(Record):
    """Where a group's payload is, and what it must be."""

    uri: str = Field(min_length=1)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """Of the stored (compressed) bytes."""
    size: int = Field(ge=1)
    """Bytes stored."""
    raw_size: int = Field(ge=1)
    """Bytes after decompression: a bound that is checked while decompressing."""
    codec: str = Field(default="zstd", pattern="^zstd$")
    content_type: str
    """Of the decompressed group."""
    group_id: str | None = Field(default=None, min_length=1, max_length=256)
    job_id: str | None = Field(default=None, min_length=1, max_length=256)
