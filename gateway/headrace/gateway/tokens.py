"""Tokens: who may call, for which account and which of its projects.

A token is `hr_<id>_<secret>`; what is kept is its id, owner, account, projects, a salt and SHA-256 of salt and secret, an object a line.
The secret has 256 random bits, so a slow hash would add nothing. Guarantees: the secret is shown once, when it is made, and stands nowhere;
comparing takes the same time whatever the secret; a file that was changed is read again with the next request; creates and revokes of
any number of processes take turns by a lock file next to the tokens, so none undoes another, and each is durable when the call returns.
Limitations: tokens do not expire; the file system must have `flock`.

Keys that requests hold: encrypted before they go into the log, or refused.

Guarantees: what `seal` returns can be read with the same `gateway.secrets_key` only (Fernet: AES-128-CBC with an HMAC, the key derived by
HKDF-SHA256); without that setting nothing is taken. Errors name the field, never the value. Limitations: a change of the key; what was
encrypted with the one before can't be read any more, and says so.
"""

import base64
import contextlib
import fcntl
import hashlib
import hmac
import os
import secrets
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path

from cryptography.fernet import Fernet, InvalidToken
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError

from headrace.core.errors import HeadraceError
from headrace.core.processes import make_private_folder
from headrace.core.settings import GatewaySettings
from headrace.schemas.base import utc_now

_PREFIX = "hr"


class TokensError(HeadraceError):
    """The tokens can't be read, or there is no such token; says what to do."""


class StoredToken(BaseModel):
    """One token as it is kept: not the token."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str = Field(pattern=r"^[0-9a-f]{8}$")
    account: str = Field(min_length=1, max_length=128)
    owner: str = Field(min_length=1, max_length=256)
    projects: tuple[str, ...] = ()
    """Empty: all of the account."""
    salt: str = Field(pattern=r"^[0-9a-f]{32}$")
    digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    created_at: datetime = Field(default_factory=utc_now)

    def is_of(self, secret: str) -> bool:
        """Whether this is the secret."""
        return hmac.compare_digest(self.digest, _digest(self.salt, secret))


class Tokens:
    """Those of the settings and of the file that they name.

    Raises:
        TokensError: a line can't be read.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self._fixed = _parse(settings.tokens, "gateway.tokens")
        self._file = settings.tokens_file
        self._stamp: tuple[int, int, int] | None = None
        self._of_file: dict[str, StoredToken] = {}
        self._reload()

    @property
    def configured(self) -> bool:
        """Whether there is any; without one, everybody may call, and the gateway listens on loopback only."""
        self._reload()
        return bool(self._fixed or self._of_file) or self._file is not None

    def find(self, token: str) -> StoredToken | None:
        """The stored token that this one is."""
        self._reload()
        parts = token.split("_", 2)
        if len(parts) != 3 or parts[0] != _PREFIX:
            return None
        stored = self._of_file.get(parts[1]) or self._fixed.get(parts[1])
        return stored if stored is not None and stored.is_of(parts[2]) else None

    def _reload(self) -> None:
        if self._file is None:
            return
        try:
            found = self._file.stat()
        except FileNotFoundError:
            self._of_file, self._stamp = {}, None
            return
        stamp = (found.st_mtime_ns, found.st_size, found.st_ino)
        if stamp != self._stamp:
            self._of_file, self._stamp = _parse(self._file.read_text(encoding="utf-8").splitlines(), str(self._file)), stamp


def create_token(file: Path, *, account: str, owner: str, projects: Sequence[str] = ()) -> tuple[StoredToken, str]:
    """Make a token, keep its digest in the file; returns what is kept, and the token itself, which no one can show again.

    Raises:
        TokensError: the file can't be read or written.
    """
    secret, salt = secrets.token_urlsafe(32), secrets.token_hex(16)
    try:
        stored = StoredToken(
            id=secrets.token_hex(4), account=account, owner=owner, projects=tuple(projects), salt=salt, digest=_digest(salt, secret)
        )
    except ValidationError as error:
        raise TokensError("; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())) from error
    with _locked(file) as own:
        _write(own, [*list_tokens(own), stored])
    return stored, f"{_PREFIX}_{stored.id}_{secret}"


def list_tokens(file: Path) -> list[StoredToken]:
    """Those of a file; none if it does not exist.

    Raises:
        TokensError: a line can't be read.
    """
    if not file.exists():
        return []
    return list(_parse(file.read_text(encoding="utf-8").splitlines(), str(file)).values())


def revoke_token(file: Path, token_id: str) -> StoredToken:
    """Take a token out of the file; requests with it are refused from then on.

    Raises:
        TokensError: there is none with that id.
    """
    with _locked(file) as own:
        there = list_tokens(own)
        gone = next((token for token in there if token.id == token_id), None)
        if gone is None:
            raise TokensError(f"{file} has no token {token_id!r}; it has: {', '.join(token.id for token in there) or 'none'}")
        _write(own, [token for token in there if token.id != token_id])
    return gone


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[Path]:
    """Let one process at a time change the file, whose own path is given, without links.

    The lock file stays: if one process removed it, two others could each lock a file of their own.
    """
    try:
        own = file.resolve()
        make_private_folder(own.parent)
        lock = os.open(own.with_name(f".{own.name}.lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield own
        finally:
            os.close(lock)
    except OSError as error:
        raise TokensError(f"{file} can't be changed: {error.strerror}") from error


def _write(file: Path, tokens: Iterable[StoredToken]) -> None:
    """Replace the file as a whole, readable by its owner alone."""
    try:
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as out:
                out.writelines(f"{token.model_dump_json()}\n" for token in tokens)
                out.flush()
                os.fsync(out.fileno())
            Path(name).replace(file)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise
        folder = os.open(file.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise TokensError(f"{file} can't be written: {error.strerror}") from error


def _parse(lines: Iterable[str], where: str) -> dict[str, StoredToken]:
    found: dict[str, StoredToken] = {}
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.startswith("#"):
            try:
                token = StoredToken.model_validate_json(line)
            except ValidationError as error:
                raise TokensError(
                    f"{where} line {number} is no token as `headrace tokens create` writes it: {error.error_count()} faults"
                ) from error
            found[token.id] = token
    return found


def _digest(salt: str, secret: str) -> str:
    return hashlib.sha256(bytes.fromhex(salt) + secret.encode(errors="replace")).hexdigest()


_SHORTEST = 32


class SecretBoxError(HeadraceError):
    """A secret that can't be kept or read."""


class SecretBox:
    """Encrypts with one key.

    Args:
        key: `gateway.secrets_key`.

    Raises:
        SecretBoxError: the key is too short.
    """

    def __init__(self, key: SecretStr | None) -> None:
        self._fernet: Fernet | None = None
        if key is not None:
            text = key.get_secret_value().encode()
            if len(text) < _SHORTEST:
                raise SecretBoxError(
                    f"gateway.secrets_key has {len(text)} bytes: a random text of {_SHORTEST} characters or more is needed"
                )
            derived = HKDF(algorithm=SHA256(), length=32, salt=None, info=b"headrace secret box").derive(text)
            self._fernet = Fernet(base64.urlsafe_b64encode(derived))

    def seal(self, field: str, secret: str) -> str:
        """Encrypt.

        Args:
            field: For the message.
            secret: Clear text.

        Raises:
            SecretBoxError: there is no key.
        """
        if self._fernet is None:
            raise SecretBoxError(
                f"{field}: this gateway takes no keys, since it can't encrypt them: set gateway.secrets_key (a random text of {_SHORTEST} "
                "characters or more), or leave the field out"
            )
        return self._fernet.encrypt(secret.encode()).decode()

    def open(self, field: str, sealed: str) -> str:
        """Decrypt.

        Raises:
            SecretBoxError: there is no key, or another one.
        """
        try:
            if self._fernet is not None:
                return self._fernet.decrypt(sealed.encode()).decode()
        except InvalidToken:
            pass
        raise SecretBoxError(f"{field}: it was encrypted with another gateway.secrets_key than this gateway has: give it again")
