"""`python -m torchfleet.server`: one parameter server, without torch and without a script."""

from __future__ import annotations

import sys

from torchfleet.ps.server.job.main import main

if __name__ == "__main__":
    sys.exit(main())
