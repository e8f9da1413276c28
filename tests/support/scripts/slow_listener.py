"""A listener that reads its requests only when it is told to. Arguments: what listens (plain: libzmq alone; guarded:
torchfleet's Listener), whether it ends its connections by itself first (shut), and the number of requests that it waits
for, however long they take; it reads others as long as they come.

Prints its port; at each line of its input it goes on, and prints how many requests it has read.
"""

from __future__ import annotations

import sys

import zmq

from torchfleet.ps.net.sockets import QUEUED_REQUESTS, Listener


def told() -> None:
    sys.stdin.readline()


def main() -> None:
    kind, how, wanted = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if kind == "plain":
        read = zmq.Context().socket(zmq.ROUTER)
        read.set(zmq.RCVHWM, QUEUED_REQUESTS)
        print(read.bind_to_random_port("tcp://127.0.0.1"), flush=True)
    else:
        listener = Listener("tcp://127.0.0.1:*")
        read = listener._socket
        print(listener.endpoint.rpartition(":")[2], flush=True)
    told()
    if how == "shut":
        keeper = listener._doorkeeper
        keeper.look(0.0)
        for number in list(keeper._doors):
            keeper.shut(number, "test")
        print("shut", flush=True)
        told()
    num = 0
    while read.poll(60_000 if num < wanted else 300):
        read.recv_multipart()
        num += 1
    print(num, flush=True)
    told()


main()
