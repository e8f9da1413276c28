"""`python -m torchfleet.observe.commands` is `fleet`."""

import sys

from torchfleet.observe.commands.command import main

sys.exit(main())
