"""Which objects of the store a request may name by their URIs: those that the caller's own models and datasets made, and shared ones.

The rule is a list of what is allowed, on the key as the store will read it: `models/<id>/` and `logged/<id>/` of a model that the caller
sees, the files of its account's datasets, and what lies in a folder of `gateway.shared_folders`. Guarantees: everything else is answered
as if it did not exist, whether it does or not; folders are compared part by part, so that `shared` is not `shared2`; what is checked is
the key that is read, and names in the store are never used again. Without configured tokens all of the store is the one account's.
Limitations: claim checks (`payloads/`), which are named by content and so no one's own; several clusters that share one store and give
one account's name to different people.
"""

import re
from dataclasses import dataclass

from headrace.core.errors import HeadraceError
from headrace.core.store import InvalidKeyError, ObjectStore
from headrace.gateway.access import Caller
from headrace.gateway.gate import Gate
from headrace.gateway.rlor.resources import PROJECT
from headrace.gateway.tables import Tables
from headrace.schemas.gateway import checkpoint_key
from headrace.schemas.rlor import DatasetFile, account_files_prefix

_OF_A_MODEL = re.compile(r"(?:models|logged)/(?P<model>[^/]+)/.")
_OF_A_CHECKPOINT = re.compile(r"models/(?P<model>[^/]+)/(?P<incarnation>[^/]+)/weights/(?P<step>[0-9]{8,18})-")
_ENCODED = re.compile(r"%(?:2f|5c|2e)", re.IGNORECASE)
"""Slashes and dots: a key is literal here, but who knows what stands between us and a bucket."""
_ARTIFACT = re.compile(r"wandb-artifact:///(?P<entity>[^/]+)/(?P<project>[^/]+)/[^/]+")


class NotReachableError(HeadraceError):
    """A URI that means nothing to this caller; says what may be named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """What one caller may name now."""

    store: ObjectStore
    tables: Tables
    caller: Caller
    shared: tuple[str, ...]
    """Folders of the store that every account may name."""

    @classmethod
    def of(cls, gate: Gate, tables: Tables, caller: Caller) -> "Reach":
        """Of a request."""
        return cls(store=gate.store, tables=tables, caller=caller, shared=gate.settings.gateway.shared_folders)

    def key(self, uri: str) -> str:
        """The key of a URI that may be named; whether the object is there is seen when it is read.

        Raises:
            NotReachableError: it is in another store, is no URI of one, or is another's.
        """
        try:
            key = self.store.resolve(uri)
        except InvalidKeyError as error:
            raise NotReachableError(str(error)) from None
        if not self.caller.is_local and (_ENCODED.search(key) or not (self._is_shared(key) or self._is_own(key))):
            raise NotReachableError(f"{uri[:200]!r} does not exist, or is not this account's: {self.may_be_named}")
        return key

    @property
    def may_be_named(self) -> str:
        """For messages."""
        shared = f", or what lies in {', '.join(self.shared)} (gateway.shared_folders)" if self.shared else ""
        return f"name what a model or a dataset of the account has in the object store{shared}"

    def maps(self, artifact: str, uri: str) -> bool:
        """Whether a name that the operator mapped to a URI is the caller's to use: by its entity and project, or by where it lies."""
        named = _ARTIFACT.fullmatch(artifact)
        if self.caller.is_local or (named is not None and self.caller.sees(named["entity"], named["project"])):
            return True
        try:
            self.key(uri)
        except NotReachableError:
            return False
        return True

    def _is_shared(self, key: str) -> bool:
        return any(key == folder or key.startswith(f"{folder}/") for folder in self.shared)

    def _is_own(self, key: str) -> bool:
        if (found := _OF_A_MODEL.match(key)) is not None:
            view = self.tables.model(found["model"])
            return view is not None and self.caller.sees(view.account, view.project) and not self._is_deleted(key)
        account = self.caller.account
        if not key.startswith("datasets/") or not self.caller.sees(account, PROJECT):
            return False
        files = self.tables.facts_under(account_files_prefix(account))
        return any(isinstance(file, DatasetFile) and file.account == account and file.uri == self.store.uri(key) for file in files)

    def _is_deleted(self, key: str) -> bool:
        """Whether it is of a checkpoint that was deleted: its files go at any moment."""
        found = _OF_A_CHECKPOINT.match(key)
        return found is not None and checkpoint_key(found["model"], found["incarnation"], int(found["step"])) in self.tables.facts
