"""`fleet plan`: memory, network, speed, saves, failures and money of a job, before anything is rented."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, get_args

from torchfleet.base.errors import FleetError
from torchfleet.base.network_links import parse_link
from torchfleet.base.pages import page
from torchfleet.base.printable import say
from torchfleet.observe.plan.job_plan import Durability, JobSize, Plan, plan_of
from torchfleet.observe.plan.model_plan import STATES, ModelSize, RankPlan, plans, size_of
from torchfleet.observe.plan.units import Unit, read_units
from torchfleet.observe.watch.figures import plural
from torchfleet.ps.tables.settings.row_format import DTYPES
from torchfleet.ps.tables.settings.rule import RULES


def add_commands(commands: Any) -> None:
    """As command.py describes."""
    plan = commands.add_parser(
        "plan",
        help="memory, network, speed, saves, failures and money of a job of any size, from measured units",
        description="What a job of servers and workers needs and does, computed from units that were measured "
        "(--units lists them with their sources; --unit NAME=VALUE puts one of your own in the place of one). "
        f"{page('internet_scale')} explains every line.",
    )
    plan.add_argument("--rows", type=float, default=1e9, help="rows of all tables (default: 1e9)")
    plan.add_argument("--dim", type=int, default=16, help="numbers in a row (default: 16)")
    plan.add_argument(
        "--rule", choices=sorted(RULES), default="adagrad", help="optimizer of the rows (default: adagrad)"
    )
    plan.add_argument("--dtype", choices=DTYPES, default="float32", help="of the rows on servers (default: float32)")
    plan.add_argument("--workers", type=int, default=16, metavar="N", help="a core each (default: 16)")
    plan.add_argument("--servers", type=int, default=4, metavar="N", help="default: 4")
    plan.add_argument("--link", default="10Gbit", help="of each machine, such as 25Gbit,20us (default: 10Gbit,50us)")
    plan.add_argument("--mode", choices=("hybrid", "async"), default="hybrid", help="default: hybrid")
    plan.add_argument("--batch", type=int, default=1000, metavar="N", help="samples of a worker's step (default: 1000)")
    plan.add_argument("--ids_per_sample", type=int, default=26, metavar="N", help="default: 26")
    plan.add_argument(
        "--durability",
        choices=get_args(Durability),
        default="backups",
        help="what saves rows when a server dies: fleetrun --replicas 2, --durability log, or the last save "
        "(default: backups)",
    )
    plan.add_argument("--save_hours", type=float, default=6.0, metavar="H", help="between two saves (default: 6)")
    plan.add_argument(
        "--machine_hours", type=float, default=20_000.0, metavar="H", help="between two failures (default: 20000)"
    )
    plan.add_argument("--worker_price", type=float, default=0.0, metavar="P", help="of a worker's machine and hour")
    plan.add_argument("--server_price", type=float, default=0.0, metavar="P", help="of a server's machine and hour")
    plan.add_argument("--unit", type=_change, action="append", default=[], metavar="NAME=VALUE", help="your own unit")
    plan.add_argument(
        "--model",
        metavar="MODULE:FUNCTION",
        help="of a collective job: what makes the model, or the model and a tuple of its inputs; the plan is then that "
        f"of its ranks, by strategy ({page('collective/which_strategy')})",
    )
    plan.add_argument("--ranks", type=int, default=8, metavar="N", help="with --model (default: 8)")
    plan.add_argument("--optimizer", choices=sorted(STATES), default="adam", help="with --model (default: adam)")
    plan.add_argument("--tflops", type=float, default=0.0, help="with --model: of a rank, as reached, for the time")
    plan.add_argument("--units", action="store_true", help="list the units and their sources")
    plan.add_argument("--json", action="store_true", help="all figures as one JSON object")
    plan.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    units = read_units(dict(options.unit))
    if options.units:
        for name, unit in units.items():
            say(f"{name}: {unit.value:g} {unit.unit}. {unit.what} ({unit.source})")
        return 0
    if options.model:
        return _plan_model(options)
    given = {name: value for name, value in vars(options).items() if name in JobSize.__dataclass_fields__}
    plan = plan_of(JobSize(**{**given, "link": parse_link(options.link)}), units)
    if options.json:
        print(json.dumps({**plan.figures, "bound": plan.bound, "units": _values(units)}))
        return 0
    for line in lines(plan):
        say(line)
    return 0


def _plan_model(options: argparse.Namespace) -> int:
    if options.ranks < 1:
        raise FleetError(f"fleet plan --ranks {options.ranks}: expected at least one rank")
    size = size_of(options.model)
    found = list(plans(size, options.ranks, options.optimizer))
    seconds = size.flops / (options.tflops * 1e12) if options.tflops else 0.0
    if options.json:
        figures = {"compute_s": seconds, "flops": size.flops, "parameter_bytes": size.parameters}
        print(json.dumps({**figures, "plans": {one.strategy: asdict(one) for one in found}}))
        return 0
    for line in model_lines(size, found, options, seconds):
        say(line)
    return 0


def model_lines(
    size: ModelSize, found: Sequence[RankPlan], options: argparse.Namespace, seconds: float
) -> Iterator[str]:
    """Yield the plan of a model as lines of text."""
    link = parse_link(options.link)
    yield (
        f"{_bytes(size.parameters)} of trained parameters, {_bytes(size.activations)} of activations, "
        f"{size.flops:.3g} operations a step; {options.ranks} ranks, {options.optimizer}"
    )
    if seconds:
        yield f"computing takes {_time(seconds)} a step at {options.tflops:g} TFLOP/s"
    for one in found:
        exchange = _time(one.exchanged_bytes / link.bytes_per_second) if one.exchanged_bytes else "none"
        yield (
            f"{one.strategy:26} {_bytes(one.bytes):>8} a rank ({_bytes(one.state_bytes)} at rest); "
            f"exchange {exchange} a step, partly beside computing"
        )


def lines(plan: Plan) -> Iterator[str]:
    """Yield the plan as lines of text."""
    size = plan.size
    yield (
        f"{size.rows:.3g} rows × dim {size.dim}, {size.rule}, {size.dtype}: {plan['row_bytes']:.0f} bytes a row, "
        f"{_bytes(plan['table_bytes'])} in all"
    )
    copies = " with the backups of another" if plan["copies"] == 2 else ""
    yield f"memory      {_bytes(plan['server_bytes'])} on each of {plural(size.servers, 'server')}{copies}"
    yield (
        f"speed       {plan['samples_per_s']:,.0f} samples/s of {plural(size.workers, 'worker')}, {size.mode}: a step "
        f"of {size.batch:,} samples takes {1e3 * plan['step_s']:.1f} ms, bound by {plan.bound}"
    )
    yield (
        f"            servers busy {plan['server_busy']:.0%}; computing {1e3 * plan['compute_s']:.1f} ms, "
        f"averaging the network {1e3 * plan['reduce_s']:.1f} ms of a step"
    )
    yield (
        f"network     {_bytes(plan['to_servers'] + plan['from_servers'])} a step of a worker; links used: workers "
        f"{plan['worker_link']:.0%}, servers {plan['server_link']:.0%}; {_bytes(plan['network_bytes_per_s'])}/s in all"
    )
    yield (
        f"saves       {_bytes(plan['saved_bytes'])}; all servers at once, each to its own disk: save "
        f"{_time(plan['save_s'])}, load {_time(plan['load_s'])}"
    )
    yield (
        f"failures    a day: {plan['server_failures']:.2g} of servers, which stop the job for "
        f"{_time(plan['server_failure_s'])} each ({size.durability}), {plan['worker_failures']:.2g} of workers, "
        f"{_time(plan['worker_failure_s'])} each; goodput {plan['goodput']:.3%}"
    )
    if plan["refill_s"]:
        yield (
            f"            a new backup is filled in {_time(plan['refill_s'])}; a second failure meanwhile, once in "
            f"{1 / plan['both_copies_lost'] / 365:,.0f} years, goes back to the last save"
        )
    if plan["price_day"]:
        yield f"money       {plan['price_day']:,.0f} a day; {plan['price_billion_samples']:,.2f} per billion samples"


def _values(units: dict[str, Unit]) -> dict[str, float]:
    return {name: unit.value for name, unit in units.items()}


def _bytes(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:,.3g} PB"


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _change(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, such as save_mb_per_s=2000, found {text!r}") from None
