"""DeepSpeed's JSON in, a frozen `Plan` out.

`load_config` (a path, a dictionary or script flags) -> `resolve` (schema, "auto", batch triad) -> `Plan`.
pydantic is imported inside `resolve`, never by importing this package.
"""

from slipstream.config.arguments import add_config_arguments, load_config
from slipstream.config.plan import (
    BatchPlan,
    CheckpointPlan,
    DataPlan,
    DataWorld,
    DebugPlan,
    LossScalePlan,
    ModelFacts,
    OptimizerPlan,
    Plan,
    PrecisionPlan,
    SchedulerPlan,
    ZeroPlan,
    describe,
)
from slipstream.config.resolution import for_inference, resolve

__all__ = [
    "BatchPlan",
    "CheckpointPlan",
    "DataPlan",
    "DataWorld",
    "DebugPlan",
    "LossScalePlan",
    "ModelFacts",
    "OptimizerPlan",
    "Plan",
    "PrecisionPlan",
    "SchedulerPlan",
    "ZeroPlan",
    "add_config_arguments",
    "describe",
    "for_inference",
    "load_config",
    "resolve",
]
