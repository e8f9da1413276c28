"""`python -m torchfleet.observe.commands` is `fleet`."""

import sys

from torchfleet.base.entry import run


def main() -> int:
    """The command `fleet`. Returns its exit status."""
    return run("torchfleet.observe.commands.command")


if __name__ == "__main__":
    sys.exit(main())
