"""`python -m thinwire` is the `thinwire` command; this is what torchrun starts."""

import sys

from thinwire.cli import main

if __name__ == "__main__":
    sys.exit(main())
