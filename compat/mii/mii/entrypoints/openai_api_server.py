"""`python -m mii.entrypoints.openai_api_server`: `slipstream serve` with DeepSpeed-MII's options."""

import sys

from slipstream.compat.commands import openai_api_server

if __name__ == "__main__":
    sys.exit(openai_api_server())
