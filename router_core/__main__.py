"""``python -m router_core`` is ``slime-router``."""

import sys

from router_core.cli import main

if __name__ == "__main__":
    sys.exit(main())
