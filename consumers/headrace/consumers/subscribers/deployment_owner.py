"""Whose a deployment is, from the gateway's records: engines know a deployment by its id alone, and an id is one account's.

Guarantees: where an account has the deployment, only versions of that account's models count, and only what that account asks to load.
Limitations: a deployment that no account has is open to whatever names it; so are versions of releases that did not say whose they are.
"""

from collections.abc import Sequence
from datetime import datetime

from aiokafka import ConsumerRecord

from headrace.core.kept import kept_or_none
from headrace.schemas.deployments import DeploymentFact, deployment_key
from headrace.schemas.gateway import FACTS


class DeploymentOwner:
    """What the records so far come to.

    Args:
        deployment: Its id.
    """

    def __init__(self, deployment: str) -> None:
        self._deployment = deployment
        self._since: dict[str, datetime] = {}
        """When each account made it; more than one only where two made it in one moment."""
        self.is_known = False
        """The records that were there at the start have been read: before that no one may."""

    @property
    def account(self) -> str | None:
        """Whose it is; None: no one's."""
        return min(self._since, key=lambda account: (self._since[account], account), default=None)

    def observe(self, batch: Sequence[ConsumerRecord]) -> bool:
        """Take records of the topic `gateway` in; whether the owner is another one now."""
        before = self.account
        for record in batch:
            if record.key is None or not record.key.startswith(deployment_key("", "")[:-1].encode()):
                continue
            for account in [account for account in self._since if deployment_key(account, self._deployment).encode() == record.key]:
                del self._since[account]
            fact = None if record.value is None else kept_or_none(record, FACTS)
            if isinstance(fact, DeploymentFact) and fact.id == self._deployment:
                self._since[fact.account] = fact.created_at
        return self.account != before

    def allows(self, account: str | None) -> bool:
        """Whether what this account publishes, or asks for, concerns the deployment."""
        return self.is_known and (account is None or self.account in {None, account})
