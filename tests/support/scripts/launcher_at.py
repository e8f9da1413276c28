"""fleetrun as a machine with a loopback address of its own: `launcher_at.py HOST ARGUMENTS`.

torch numbers the machines of an elastic job by their addresses.
"""

from __future__ import annotations

import sys

from torchfleet.launch.cli import main
from torchfleet.launch.ranks.rendezvous import ElasticRendezvous

host = sys.argv.pop(1)
ElasticRendezvous._own_host = lambda self: host  # type: ignore[method-assign]
sys.exit(main(sys.argv[1:]))
