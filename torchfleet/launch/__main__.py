"""`python -m torchfleet.launch` is `fleetrun`."""

import sys

from torchfleet.base.entry import run


def main() -> int:
    """The command `fleetrun`. Returns its exit status."""
    return run("torchfleet.launch.cli")


if __name__ == "__main__":
    sys.exit(main())
