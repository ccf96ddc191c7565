"""`python -m slipstream`: the `slipstream` command."""

import sys

from slipstream.launch.cli import main

sys.exit(main())
