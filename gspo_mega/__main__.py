"""`python -m gspo_mega`: the same as the `gspo-mega` script."""

import sys

from gspo_mega.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
