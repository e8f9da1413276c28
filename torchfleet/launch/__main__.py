"""`python -m torchfleet.launch` is `fleetrun`."""

import sys

from torchfleet.launch.cli import main

sys.exit(main())
