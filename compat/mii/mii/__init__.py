"""DeepSpeed-MII's API, implemented by Slipstream (slipstream.compat.mii). Contains no code of DeepSpeed-MII."""

from slipstream.compat.mii import *  # noqa: F403
from slipstream.compat.mii import __all__ as __all__

__version__ = "0.3.3+slipstream.0.1.0"
