"""`python -m gspo_mega`: the same as the `gspo-mega` script."""

import sys

from gspo_mega.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
