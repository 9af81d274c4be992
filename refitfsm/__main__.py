"""`python -m refitfsm`: the command line."""

import sys

from refitfsm.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
