"""Snapshots by their identities: what a step wrote for a deployment, and which version that is. Pure.

A step of a job with `hotLoadDeploymentId`, or of one that a deployment names as its trainer, writes the manifest of its version as
`deployments/<folder>/<identity>/manifest.json`; the identity stands in the ledger.
"""

from headrace.gateway.rlor.deployment_facts import Ack, Deployment
from headrace.gateway.rlor.model_facts import version_of
from headrace.gateway.tables import Tables
from headrace.schemas.weights import WeightsPublished


def find_snapshot(tables: Tables, deployment: Deployment, identity: str) -> WeightsPublished | None:
    """The version that a snapshot of a deployment is; None: there is no such snapshot."""
    for model_id, history in tables.steps.items():
        entry = history.of_snapshot(identity, deployment.snapshot_folders)
        view = None if entry is None else tables.model(model_id)
        if entry is not None and view is not None and view.account == deployment.fact.account:
            return version_of(view, entry)
    return None


def identity_of(tables: Tables, version: WeightsPublished | Ack) -> str:
    """What a version is called as a snapshot: the identity of its own, else `v<version>`; empty for the base model."""
    history = tables.steps.get(version.model_id)
    entry = history.find(version.policy_version) if history is not None and history.incarnation == version.incarnation else None
    if entry is not None and entry.hot_load_identity is not None:
        return entry.hot_load_identity
    return f"v{version.policy_version}" if version.policy_version else ""
