"""Keys that requests hold: encrypted before they go into the log, or refused.

Guarantees: what `seal` returns can be read with the same `gateway.secrets_key` only (Fernet: AES-128-CBC with an HMAC, the key derived by
HKDF-SHA256); without that setting nothing is taken. Errors name the field, never the value. Limitations: a change of the key; what was
encrypted with the one before can't be read any more, and says so.
"""

import base64

from cryptography.fernet import Fernet, InvalidToken
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from pydantic import SecretStr

from headrace.core.errors import HeadraceError

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
