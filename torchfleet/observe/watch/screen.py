"""The live display as lines: never more than the screen has, never wider."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.text import Text

from torchfleet.base.monitor.snapshot import JobSnapshot, RoleSnapshot
from torchfleet.base.printable import bare
from torchfleet.base.role.role_info import HETER_WORKER
from torchfleet.observe.watch import figures
from torchfleet.observe.watch.columns_fit import Column, cropped, field_of, metrics_of, table
from torchfleet.observe.watch.head_lines import Part, fitted, wrapped
from torchfleet.observe.watch.job_totals import JobTotals, Progress, totals_of
from torchfleet.observe.watch.plain_lines import speed

_MOST_WARNINGS = 3
_LEAST = 4  # the fewest lines for which a table is shown: headings and a few rows


def _state(role: RoleSnapshot) -> str:
    if role.state == "failed":
        return f"ended with {role.returncode}"
    if role.state == "running" and role.status.get("left"):
        return "leaving"
    if role.state == "running" and role.status.get("backup"):
        return "backup"
    return role.state


def _queue(role: RoleSnapshot) -> str:
    status = role.status
    return f"{status['queue']}/{status['queue_size']}" if "queue_size" in status else ""


def _epoch(role: RoleSnapshot) -> str:
    found = role.status.get("progress", {})
    if not found:
        return ""
    part = figures.share(found["done"] / found["total"]) if found.get("total") else figures.count(found["done"])
    return f"{found['epoch'] + 1}: {part}"


def _rows(role: RoleSnapshot) -> float | None:
    return sum(role.status["rows"].values()) if "rows" in role.status else None


def _bytes(role: RoleSnapshot) -> float | None:
    tables = role.status.get("tables")
    return sum(found["bytes"] for found in tables.values()) if tables else None


def _shown(number: float | None, shown: Callable[[float], str]) -> str:
    return "" if number is None else shown(number)


_NAME = Column("role", 0, lambda role: role.name)
_STATE = Column("state", 1, _state, is_text=True)
_RESTARTS = Column("restarts", 5, lambda role: str(role.num_restarts or ""))
_MEMORY = Column("memory", 7, **field_of("memory", figures.size))
WORKER_COLUMNS = (
    _NAME,
    _STATE,
    Column("epoch", 8, _epoch),
    Column("steps", 4, **field_of("steps", figures.count)),
    Column("samples/s", 2, **field_of("samples_per_s", figures.rate)),
    Column("queue", 9, _queue),
    Column("waits", 3, **field_of("waiting", figures.share)),
    Column("pull ms", 10, **field_of("pull_wait_ms", lambda value: f"{value:.1f}")),
    Column("push ms", 11, **field_of("push_wait_ms", lambda value: f"{value:.1f}")),
    _MEMORY,
    _RESTARTS,
    Column("metrics", 6, metrics_of, is_text=True),
)
HETER_COLUMNS = (
    _NAME,
    _STATE,
    Column("workers", 3, **field_of("sessions", figures.count)),
    Column("passes", 4, **field_of("passes", figures.count)),
    Column("busy", 2, **field_of("busy", figures.share)),
    _MEMORY,
    _RESTARTS,
)
SERVER_COLUMNS = (
    _NAME,
    _STATE,
    Column("requests/s", 4, **field_of("requests_per_s", figures.rate)),
    Column("busy", 2, **field_of("busy", figures.share)),
    Column("rows", 3, lambda role: _shown(_rows(role), figures.count), _rows),
    Column("bytes", 6, lambda role: _shown(_bytes(role), figures.size), _bytes, figures.size),
    _MEMORY,
    _RESTARTS,
)


class Screen:
    """Makes lines of snapshots."""

    def __init__(self, log_dir: str = "", verbose: bool = False) -> None:
        self._log_dir, self._verbose = log_dir, verbose

    def lines(
        self, snapshot: JobSnapshot, elapsed: float, warnings: Sequence[str], told: str, width: int, height: int
    ) -> list[Text]:
        """`told`: what the job waits for."""
        totals = totals_of(snapshot)
        head = [self._header(snapshot, totals, elapsed)]
        if totals.progress is not None:
            head.append([Part(_bar(totals.progress, width))])
        head += [line for line in (_speed(totals), _state_of_servers(totals), _sentence(totals.staleness)) if line]
        head += [_sentence(f"! {text}", "yellow bold", -1) for text in warnings[:_MOST_WARNINGS]]
        if len(warnings) > _MOST_WARNINGS:
            head.append(_sentence(f"! {len(warnings) - _MOST_WARNINGS} more warnings", "yellow bold"))
        head += [line for line in [_sentence(told, "dim")] if line]
        shown = _head(head, width, height, 1 + sum(_wanted(snapshot)))[: max(1, height)]
        return shown + self._tables(snapshot, width, height - len(shown))

    def _header(self, snapshot: JobSnapshot, totals: JobTotals, elapsed: float) -> list[Part]:
        servers = {role.index for role in snapshot.of("server")}  # a server and its backup are one
        others = snapshot.training
        parts = [figures.plural(len(servers), "server")] if servers else []
        parts += [figures.plural(len(others), others[0].role)] if others else []
        heters = snapshot.of(HETER_WORKER)
        parts += [figures.plural(len(heters), "heter worker")] if heters else []
        line = [Part(Text(totals.mode or "fleet", "bold cyan"), 1)]
        line += [Part(Text(text, "bold"), 1) for text in (" × ".join(parts), figures.duration(elapsed)) if text]
        return [*line, Part(Text(self._log_dir, "dim"), 2)] if self._log_dir else line

    def _tables(self, snapshot: JobSnapshot, width: int, height: int) -> list[Text]:
        """Workers first; servers get a third of the lines, or more where workers leave them, and heter workers a third
        of the rest.
        """
        servers, heters = snapshot.of("server"), snapshot.of(HETER_WORKER)
        workers = snapshot.training
        tables = self._table_lines(servers) if self._verbose else []
        wanted = _wanted(snapshot)
        room = height - 1  # an empty line above
        if room < _LEAST:
            return []
        of_servers = min(wanted[0], max(room // 3, room - wanted[1] - wanted[2]))
        of_heters = min(wanted[1], max((room - of_servers) // 3, room - of_servers - wanted[2]))
        lines = table(workers, WORKER_COLUMNS, width, room - of_servers - of_heters)
        lines += table(heters, HETER_COLUMNS, width, of_heters)
        lines += table(servers, SERVER_COLUMNS, width, of_servers)
        lines += [cropped(line, width) for line in tables[: max(0, room - len(lines))]]
        return [Text(""), *lines]

    def _table_lines(self, servers: Sequence[RoleSnapshot]) -> list[Text]:
        """Every table of every server, the largest first."""
        found = [
            (
                each["bytes"],
                f"{role.name}: {bare(name)}  {figures.count(each['rows'])} rows, {figures.size(each['bytes'])}",
            )
            for role in servers
            for name, each in role.status.get("tables", {}).items()
        ]
        return [Text(text, "dim") for _, text in sorted(found, key=lambda pair: -pair[0])]


def _wanted(snapshot: JobSnapshot) -> list[int]:
    """How many lines the whole tables of servers, heter workers and workers need."""
    tables = (snapshot.of("server"), snapshot.of(HETER_WORKER), snapshot.training)
    return [len(roles) + 1 if roles else 0 for roles in tables]


def _head(head: Sequence[list[Part]], width: int, height: int, num_below: int) -> list[Text]:
    """The lines above the tables, which need `num_below` lines. They are wrapped, the most important first: lines of
    numbers while all tables fit, sentences while folded ones fit. Others are cut.
    """
    shown = [[fitted(parts, width)] for parts in head]
    for place in sorted(range(len(head)), key=lambda place: head[place][0].rank):
        whole = wrapped(head[place], width)
        room = height - (num_below if len(head[place]) > 1 else min(num_below, 1 + _LEAST))
        if sum(map(len, shown)) - len(shown[place]) + len(whole) <= room:
            shown[place] = whole
    return [line for lines in shown for line in lines]


def _bar(progress: Progress, width: int) -> Text:
    if progress.share is None:
        return Text(progress.text)
    ends = [progress.heading, figures.share(progress.share).rjust(5)]
    if progress.eta_s is not None and progress.share < 1:
        ends.append(f"ETA {figures.duration(progress.eta_s)}")
    room = min(50, width - sum(map(len, ends)) - 2 * len(ends))
    line = Text(f"{ends[0]}  ")
    if room >= 8:
        full = round(room * progress.share)
        line.append("━" * full, "cyan").append("─" * (room - full), "dim")
    return line.append(" " + "  ".join(ends[1:]))


def _sentence(text: str, style: str = "", rank: int = 1) -> list[Part]:
    """A line of words; empty without any."""
    return [Part(Text(text, style), rank)] if text else []


def _speed(totals: JobTotals) -> list[Part]:
    line = []
    if totals.samples:
        told = Text(speed(totals), "bold")
        line += [Part(told)] if told.plain else []
        line.append(Part(Text(f"{figures.count(totals.samples)} samples", "bold"), 2, ", "))
    return line + [Part(Text(text, "bold green"), 1, "   ") for text in totals.shown_metrics]


def _state_of_servers(totals: JobTotals) -> list[Part]:
    """What the job waits for is what matters most."""
    parts = []
    if totals.rows is not None:
        parts.append((2, f"{figures.count(totals.rows)} rows, {figures.size(totals.table_bytes)}"))
    if totals.server_memory:
        parts.append((3, f"memory of servers {totals.memory_text}"))
    if totals.busy is not None:
        parts.append((1, f"servers busy {figures.share(totals.busy)}"))
    if totals.waiting is not None:
        parts.append((0, f"workers wait {figures.share(totals.waiting)}"))
    return [Part(Text(text), rank, "   ") for rank, text in parts]
