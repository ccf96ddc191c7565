"""DeepSpeed-MII's API, implemented by Slipstream (slipstream.compat.mii). Contains no code of DeepSpeed-MII."""

from slipstream.compat.mii import (
    DeploymentNotFoundError,
    GenerationFinishReason,
    MIIClient,
    MIIError,
    MIIPipeline,
    Response,
    ServerError,
    UnknownArgument,
    client,
    pipeline,
    serve,
)

__version__ = "0.3.3+slipstream.0.1.0"

__all__ = [
    "DeploymentNotFoundError",
    "GenerationFinishReason",
    "MIIClient",
    "MIIError",
    "MIIPipeline",
    "Response",
    "ServerError",
    "UnknownArgument",
    "client",
    "pipeline",
    "serve",
]
