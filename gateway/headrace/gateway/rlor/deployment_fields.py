"""What a deployment may be asked to be, and the rules of it.

Guarantees: every field that is taken comes back as it was given. Gives up: acting on most of them; engines are started by whoever runs
Headrace (`headrace engine --deployment ID`), and what they run on is theirs. Whatever the transition type, requests under way keep the
version that they began with, and later ones wait for none.
"""

from typing import Literal

from pydantic import Field

from headrace.gateway.problems import ProblemError
from headrace.gateway.rlor.wire import Int32, Wire

BucketType = Literal["BUCKET_TYPE_UNSPECIFIED", "MINIO", "S3", "NEBIUS", "FW_HOSTED"]
Transition = Literal["HOT_LOAD_TRANSITION_TYPE_UNSPECIFIED", "ASYNC", "SYNC"]
DirectRoute = Literal["DIRECT_ROUTE_TYPE_UNSPECIFIED", "INTERNET", "GCP_PRIVATE_SERVICE_CONNECT", "AWS_PRIVATELINK"]


class DeploymentFields(Wire):
    """What a client may set."""

    base_model: str = Field(default="", max_length=256)
    display_name: str = Field(default="", max_length=63)
    description: str = Field(default="", max_length=4096)
    min_replica_count: Int32 | None = Field(default=None, ge=0)
    max_replica_count: Int32 | None = Field(default=None, ge=0)
    accelerator_type: str | None = Field(default=None, max_length=64)
    accelerator_count: Int32 | None = Field(default=None, ge=0)
    deployment_shape: str | None = Field(default=None, max_length=256)
    precision: str | None = Field(default=None, max_length=64)
    region: str | None = Field(default=None, max_length=64)
    max_context_length: Int32 | None = Field(default=None, ge=0)
    enable_addons: bool = False
    enable_hot_load: bool = False
    enable_hot_reload_latest_addon: bool = False
    enable_session_affinity: bool | None = None
    for_training: bool = False
    hot_load_bucket_type: BucketType | None = None
    hot_load_bucket_url: str = Field(default="", max_length=1024)
    hot_load_trainer_job: str = Field(default="", max_length=256)
    hot_load_transition_type: Transition | None = None
    direct_route_type: DirectRoute | None = None
    direct_route_api_keys: list[str] = Field(default_factory=list)


def check_fields(fields: DeploymentFields, account: str) -> None:
    """Refuse what contradicts itself.

    Raises:
        ProblemError: 400.
    """
    if not fields.base_model:
        raise ProblemError(400, "baseModel: a deployment needs the name of a base model")
    low, high = fields.min_replica_count, fields.max_replica_count
    if low is not None and high is not None and low > high:
        raise ProblemError(400, f"minReplicaCount: {low} is more than maxReplicaCount, {high}")
    if fields.direct_route_api_keys:
        raise ProblemError(400, "directRouteApiKeys: engines have no keys of their own here: reach them through this gateway")
    bucket, trainer = fields.hot_load_bucket_url, fields.hot_load_trainer_job
    if (bucket or trainer) and not fields.enable_hot_load:
        raise ProblemError(400, "enableHotLoad: must be true where hotLoadBucketUrl or hotLoadTrainerJob is given")
    if bucket and trainer:
        raise ProblemError(400, "hotLoadBucketUrl and hotLoadTrainerJob: a deployment has a bucket of its own, or its trainer's, not both")
    if bucket and f"/rl-checkpoints/{account}/" not in f"{bucket.rstrip('/')}/":
        raise ProblemError(400, f"hotLoadBucketUrl: must lie below rl-checkpoints/{account}/")
