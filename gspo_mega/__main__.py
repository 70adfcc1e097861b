"""`python -m gspo_mega`: the same as the `gspo-mega` script."""

import sys


def main() -> int:
    """Run the command line. A Ctrl-C while it is imported, which takes seconds from a slow folder, ends it quietly."""
    try:
        from gspo_mega.cli.main import main as command_line
    except KeyboardInterrupt:
        return 130
    return command_line()


if __name__ == "__main__":
    sys.exit(main())
