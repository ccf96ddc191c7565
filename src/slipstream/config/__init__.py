"""Convert DeepSpeed's JSON into a frozen `Plan`.

`load_config` (a path, a dictionary or script flags) -> `resolve` (schema, "auto", batch triad) -> `Plan`.
Importing this package does not import pydantic; `resolve` does.
"""

from slipstream.config.arguments import add_config_arguments, load_config
from slipstream.config.plan import DataWorld, ModelFacts, Plan, describe
from slipstream.config.resolution import for_inference, resolve

__all__ = ["DataWorld", "ModelFacts", "Plan", "add_config_arguments", "describe", "for_inference", "load_config", "resolve"]
