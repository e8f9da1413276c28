"""One replica of a server as a process without torch; started by benchmarks.takeover."""

from __future__ import annotations

import argparse
import secrets
import sys

from torchfleet.base.role.process_settings import log_folder
from torchfleet.ps.coordination.coordinators import make_coordinator
from torchfleet.ps.net import addresses
from torchfleet.ps.net.refused import is_refused
from torchfleet.ps.net.transport import Channel
from torchfleet.ps.net.wire import Role
from torchfleet.ps.server.job.warm import warm_up
from torchfleet.ps.server.log.durable_server import Durability
from torchfleet.ps.server.replicas.between import Identity
from torchfleet.ps.server.replicas.liveness import Liveness
from torchfleet.ps.server.replicas.replica import Replica
from torchfleet.ps.server.server import Server
from torchfleet.ps.server.server_log import speaker


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--places", required=True, help="tcp://... of all replicas, separated by |")
    parser.add_argument("--replica", type=int, required=True)
    parser.add_argument("--restart", type=int, default=0)
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--log_store", help="keep a log in a folder below this one")
    options = parser.parse_args()
    places = options.places.split("|")

    def connect(replica: int) -> Channel:
        return addresses.connect(places[replica], None, Role.SERVER)

    server = Server()
    warm_up()
    listener = addresses.listen(places[options.replica])
    server.state.say = speaker(options.replica)
    own = Identity(0, options.replica, options.restart, secrets.randbits(63) | 1)
    liveness = Liveness(lambda number: is_refused(places[number]), True)
    durability = None
    if options.log_store is not None:
        own_folder, other = (log_folder(options.log_store, 0, i) for i in (options.replica, 1 - options.replica))
        durability = Durability(own_folder, other=other)
    coordinator = make_coordinator(options.coordinator)
    replica = Replica(server, own, coordinator, connect, liveness=liveness, durability=durability)
    replica.begin()
    listener.serve(replica, lambda: replica.is_stopping)
    replica.end()
    listener.close()
    return 1 if replica.deposed else 0


if __name__ == "__main__":
    sys.exit(main())
