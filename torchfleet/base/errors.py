"""The exceptions of torchfleet. A message says what was expected, what was found, and what to do."""

from __future__ import annotations


class FleetError(Exception):
    """Base class of all exceptions of torchfleet."""


class StrategyError(FleetError):
    """A setting is unknown, wrong, contradictory or not available."""


class UnknownFieldError(StrategyError, AttributeError):
    """A strategy has no such field. Also an AttributeError, so that hasattr works."""


class UnknownKeyError(StrategyError, KeyError):
    """A dictionary of settings has no such key. Also a KeyError, so that `get` and `in` work."""

    __str__ = Exception.__str__  # KeyError's would put the message into quotes


class RoleError(FleetError):
    """The environment or the caller does not define the role of this process unambiguously."""


class NumberTaken(RoleError):
    """Another process has this worker's index and sent a heartbeat recently."""


class MissingPackage(FleetError, ModuleNotFoundError):
    """A package is not installed. Also a ModuleNotFoundError, for code that catches failed imports."""


class ModelError(FleetError):
    """A model or optimizer cannot be distributed as it is."""


class WrongIds(ModelError, TypeError):
    """Ids of a lookup are not whole numbers. Also a TypeError, as Python raises for arguments of a wrong type."""


class WireError(FleetError):
    """A message cannot be decoded, or contradicts the protocol, the receiver's state or settings of other workers."""


class TableError(FleetError):
    """A table refused a request. The table is unchanged."""


class PermissionRefused(FleetError):
    """This role may not send the command."""


class SecurityError(FleetError):
    """Keys are missing or unusable, or an address must not be used without keys."""


class BarrierError(FleetError):
    """Not all workers arrived in time."""


class WorkerMissing(FleetError):
    """Workers wait for a worker that has ended, is silent, or waits for them at another place."""


class CountedOut(FleetError):
    """The other workers continued without this worker's process. Restart it to take part again."""


class ServerLoading(FleetError):
    """A server is running but does not serve yet."""


class ServerBusy(FleetError):
    """A server refuses a request for now because this client has used up its share. A retry may succeed."""


class NotPrimary(FleetError):
    """This replica is not the primary of its shard. Another replica is, or will be in a moment."""


class CoordinatorUnreachable(FleetError):
    """The coordinator cannot be reached, so the primary is unknown for now."""


class ServerError(FleetError):
    """A server answered a request with an error."""


class ServerUnreachable(FleetError):
    """A server gave no answer within the time-out."""


class ServerRestarted(FleetError):
    """A server was restarted as a new process and has lost its state."""


class SessionLost(FleetError):
    """A heter worker does not have what this worker sent it before. The worker sends it again."""


class DataError(FleetError):
    """Data cannot be read. The message says where, what was expected and what was found."""


class CheckpointError(FleetError):
    """A saved model cannot be read or written. The message names the file."""


class LogError(FleetError):
    """A server's log cannot be read, continued or followed. The message names the file and the position."""


class LogStuck(ServerBusy):
    """A server cannot write its log now, so it acknowledges no changes. It continues when it can write again."""
