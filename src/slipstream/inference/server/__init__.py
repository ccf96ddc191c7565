"""The HTTP server over an engine: OpenAI's API, metrics and the chat page. Start reading at `app`."""

from slipstream.world.extras import needs

with needs("serving over HTTP", extra="serve"):
    from slipstream.inference.server.app import create_app
    from slipstream.inference.server.models import HostedModel, Models
    from slipstream.inference.server.router import Router
    from slipstream.inference.server.run import DeadEngineError, check, serve
    from slipstream.inference.server.sources import EngineAddress, ReplicaError, Spare

__all__ = [
    "DeadEngineError",
    "EngineAddress",
    "HostedModel",
    "Models",
    "ReplicaError",
    "Router",
    "Spare",
    "check",
    "create_app",
    "serve",
]
