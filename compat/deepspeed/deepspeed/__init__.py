"""DeepSpeed's API, implemented by Slipstream (slipstream.compat). Contains no code of DeepSpeed."""

from slipstream.compat.modules import refuse_mixture, serve

__version__ = version = "0.19.8+slipstream.0.1.0"
__version_major__, __version_minor__, __version_patch__ = 0, 19, 8
__git_hash__ = __git_branch__ = "[none]"

refuse_mixture(__path__)
serve(__name__)
