"""`python -m torchfleet.commands` is `fleet`."""

import sys

from torchfleet.commands.command import main

sys.exit(main())
