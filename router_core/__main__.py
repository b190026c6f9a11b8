"""The command ``python -m router_core``, the same as ``slime-router``."""

import sys

from slime_start.entry import main

if __name__ == "__main__":
    sys.exit(main())
