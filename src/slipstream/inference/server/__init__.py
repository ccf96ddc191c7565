"""HTTP in front of an engine: OpenAI's API, metrics and the chat page. Read `app` first."""

from slipstream.inference.server.app import create_app
from slipstream.inference.server.run import serve

__all__ = ["create_app", "serve"]
