"""`fleet doctor`: checks a machine and its links, and reports problems."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import signal
import time
from types import FrameType
from typing import Any

import msgspec

from torchfleet.base.errors import FleetError
from torchfleet.base.printable import say
from torchfleet.observe.doctor.finding import NOTE, STOPS, Finding, ordered, will_hurt
from torchfleet.observe.doctor.link import Link, LinkFacts
from torchfleet.observe.doctor.link_check import check_link, check_others
from torchfleet.observe.doctor.link_server import LinkServer
from torchfleet.observe.doctor.machine_check import check_fit, check_machine, check_ports, check_software
from torchfleet.observe.doctor.machine_facts import MachineFacts, machine_facts
from torchfleet.observe.doctor.software_facts import SoftwareFacts, software_facts
from torchfleet.observe.watch.figures import size
from torchfleet.ps.net.addresses import listen
from torchfleet.ps.net.keys import KeyFolder

_MOST_ROWS = 1e15
# Options that do not apply to --serve.
_ASKED = ("json", "ports", "server_num", "worker_num", "rows", "dim", "rule", "seconds")
_DESCRIPTION = """Look at this machine: cores, memory, limits, settings of the kernel, versions. With HOST:PORT, also at
the links to machines that run `fleet doctor --serve`, and at what differs there. With --server_num and --worker_num,
whether such a job fits. Ends with status 0 if all is well, 1 if something will hurt, 2 for a mistake of the command."""


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The command `doctor`."""
    made = commands.add_parser(
        "doctor", help="what of this machine, its software and its links will hurt a job", description=_DESCRIPTION
    )
    add = made.add_argument
    add("places", nargs="*", type=_place, metavar="HOST:PORT", help="machines that run `fleet doctor --serve`")
    serve_help = "answer `fleet doctor HOST:PORT` of other machines, until Ctrl-C (host: 127.0.0.1)"
    add("--serve", metavar="[HOST:]PORT", help=serve_help)
    add("--key_dir", default=os.environ.get("FLEET_KEY_DIR"), help="folder of keys (default: FLEET_KEY_DIR)")
    add("--insecure", action="store_true", help="serve other machines without keys")
    add("--ports", type=_ports, default=[], metavar="P,P-P", help="ports of this machine that should be free")
    add("--server_num", type=_count, help="servers of a job that is to run here")
    add("--worker_num", type=_count, help="workers of it")
    add("--rows", type=_rows, default=0.0, help="rows of its tables, such as 1e9")
    add("--dim", type=_count, help="numbers of a row (default: 16)")
    add("--rule", help="its optimizer: sgd, adagrad, adam (default: adagrad)")
    add("--seconds", type=float, help="how long bytes are sent over a link, each way (default: 1)")
    add("--json", action="store_true", help="everything as one JSON object")
    made.set_defaults(run=doctor, usage_error=made.error)


def doctor(options: argparse.Namespace) -> int:
    """Carry out the command; returns the exit status."""
    _check(options)
    if options.serve is not None:
        return _serve(options)
    try:
        return _examine(options)
    except FleetError as error:
        options.usage_error(str(error))
        raise AssertionError("argparse has ended the process") from error


def _check(options: argparse.Namespace) -> None:
    """Exit with a message for options that are invalid or have no effect."""
    if options.serve is not None:
        asked = [f"--{name}" for name in _ASKED if getattr(options, name)]
        if options.places or asked:
            what = ", ".join([*options.places, *asked])
            options.usage_error(f"--serve is the other end: ask for {what} from another machine, without --serve")
        return
    if options.insecure:
        options.usage_error("--insecure is for --serve: leave it out, or add --serve PORT")
    if options.seconds is not None and not options.places:
        options.usage_error("--seconds is about links: add HOST:PORT of a machine that runs fleet doctor --serve")
    if options.seconds is not None and not 0.1 <= options.seconds <= 60:
        options.usage_error(f"--seconds: expected 0.1 to 60, found {options.seconds:g}")
    if (options.dim is not None or options.rule is not None) and not options.rows:
        options.usage_error("--dim and --rule are about rows: add --rows, such as --rows 1e9")


def _examine(options: argparse.Namespace) -> int:
    machine, software = machine_facts(), software_facts()
    findings = [*check_machine(machine), *check_software(software, machine.gpus), *check_ports(options.ports)]
    if options.server_num is not None or options.worker_num is not None or options.rows:
        num_servers, num_workers = options.server_num or 1, options.worker_num or 1
        dim, rule = options.dim or 16, options.rule or "adagrad"
        findings += check_fit(machine, num_servers, num_workers, options.rows, dim, rule)
    own = _facts(machine, software)
    links = []
    for place in options.places:
        try:
            links.append(_measured(place, options.key_dir, options.seconds or 1.0))
        except FleetError as error:
            findings.append(Finding(STOPS, str(error), "no worker there would reach a server here", 98))
        else:
            findings += [*check_link(links[-1]), *check_others(own, links[-1].facts, place)]
    findings = ordered(findings)
    if options.json:
        parts = {"findings": findings, "links": links, **own}
        print(json.dumps(msgspec.to_builtins(parts), indent=2))
    else:
        _print(machine, software, links, findings)
    return 1 if will_hurt(findings) else 0


def _facts(machine: MachineFacts, software: SoftwareFacts) -> dict[str, Any]:
    return {"machine": msgspec.to_builtins(machine), "software": msgspec.to_builtins(software)}


def _measured(place: str, key_dir: str | None, seconds: float) -> LinkFacts:
    link = Link(place, key_dir)
    try:
        return link.measure(seconds)
    finally:
        link.close()


def _serve(options: argparse.Namespace) -> int:
    host, _, port = options.serve.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        options.usage_error(f"--serve: expected a port, or HOST:PORT; found {options.serve!r}")
    keys = KeyFolder(options.key_dir) if options.key_dir else None
    try:
        listener = listen(f"tcp://{host or '127.0.0.1'}:{port}", keys, options.insecure)
    except FleetError as error:
        options.usage_error(str(error))
    ended = False

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal ended
        ended = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    server = LinkServer(lambda: _facts(machine_facts(), software_facts()), secrets.randbits(63) | 1)
    print(f"listening on {listener.endpoint}", flush=True)
    with contextlib.closing(listener):
        listener.serve(server, lambda: ended)
    print(f"stopped after {server.num_requests:,} requests")
    return 0


def _print(machine: MachineFacts, software: SoftwareFacts, links: list[LinkFacts], findings: list[Finding]) -> None:
    left = "?" if machine.memory_left is None else size(machine.memory_left)
    total = "?" if machine.memory is None else size(machine.memory)
    say(f"{machine.host}: {machine.processor}, {machine.num_cores} cores, {left} of {total} memory left")
    say(f"Linux {machine.kernel}; {', '.join(machine.gpus) or 'no GPU'}; {time.strftime('%Y-%m-%d %H:%M:%S %Z')}")
    packages = ", ".join(f"{name} {version}" for name, version in software.packages.items())
    say(f"torchfleet {software.torchfleet}, Python {software.python}, {packages}, libzmq {software.libzmq}")
    for link in links:
        rates = " / ".join(f"{rate * 8 / 1e6:,.0f}" for rate in (link.to_bytes_s, link.from_bytes_s))
        say(
            f"{link.place}: {link.p50_ms:.2f} ms (p99 {link.p99_ms:.2f}), {rates} Mbit/s there / back, "
            f"{'CURVE' if link.is_encrypted else 'plain'}, clock {link.clock_ahead_ms:+.2f} ms "
            f"(to {link.clock_error_ms:.2f})"
        )
    say("")
    if not will_hurt(findings):
        say("nothing found that will hurt")
    for finding in findings:
        say(f"{'note' if finding.kind == NOTE else finding.kind.upper():>5}  {finding.what}")
        if finding.to_do != "nothing":
            say(f"       → {finding.to_do}")


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 65536):
        raise argparse.ArgumentTypeError(f"expected a number from 1 to 65536, found {text!r}")
    return int(text)


def _place(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not (host and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise argparse.ArgumentTypeError(f"expected HOST:PORT, found {text!r}")
    return text


def _rows(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= float(text) <= _MOST_ROWS:
            return float(text)
    raise argparse.ArgumentTypeError(f"expected a number of rows, such as 1e9, found {text!r}")


def _ports(text: str) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        numbers = [first, last] if dash else [first]
        if not all(number.isascii() and number.isdigit() and 0 < int(number) < 1 << 16 for number in numbers):
            raise argparse.ArgumentTypeError(f"expected ports such as 7000,7100-7103, found {text!r}")
        found += range(int(first), int(last or first) + 1)
    return found
