"""`python -m jcb` is the `jcb` command."""

import sys

from jcb.cli import main

if __name__ == "__main__":
    sys.exit(main())
