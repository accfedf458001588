"""``python -m lit_epgan``."""

import sys

from lit_epgan.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
