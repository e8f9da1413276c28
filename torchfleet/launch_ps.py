"""`python -m torchfleet.launch_ps` is `fleetrun`, as `python -m paddle.distributed.launch_ps` is in Paddle."""

from __future__ import annotations

import sys

from torchfleet.launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
