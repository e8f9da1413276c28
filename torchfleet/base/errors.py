"""Everything torchfleet raises on purpose. A message says what was expected, what was found, and what to do."""

from __future__ import annotations


class FleetError(Exception):
    """Base of all of them."""


class StrategyError(FleetError):
    """A setting that is unknown, wrong, contradictory or not available."""


class UnknownFieldError(StrategyError, AttributeError):
    """A field that a strategy does not have; also an AttributeError, so that hasattr works."""


class UnknownKeyError(StrategyError, KeyError):
    """A key that a dictionary of settings does not have; also a KeyError, so that `get` and `in` work."""

    __str__ = Exception.__str__  # KeyError's would put the message into quotes


class RoleError(FleetError):
    """The environment, or the caller, does not say clearly which role this process has."""


class NumberTaken(RoleError):
    """Another process has this worker's number, and was heard of not long ago."""


class MissingPackage(FleetError, ModuleNotFoundError):
    """A package that is not installed; also a ModuleNotFoundError, which those who try to import something expect."""


class ModelError(FleetError):
    """A model or optimizer that cannot be distributed as it is."""


class WireError(FleetError):
    """Bytes that are not a message of our protocol."""


class TableError(FleetError):
    """A request that a table cannot take; the table is as it was before."""


class PermissionRefused(FleetError):
    """A command that this role may not give."""


class SecurityError(FleetError):
    """Keys that are missing or unusable, or an address that must not be used without them."""


class BarrierError(FleetError):
    """Not all workers arrived in time."""


class WorkerMissing(FleetError):
    """Workers wait for one that has ended, is silent, or waits for them somewhere else."""


class CountedOut(FleetError):
    """The others have gone on without this worker's process: it must be started again to take part."""


class ServerLoading(FleetError):
    """A server is there, and does not serve yet."""


class ServerBusy(FleetError):
    """A server refuses a request for now: this client has used up its share. Asking again later may help."""


class NotPrimary(FleetError):
    """A replica of a server that does not answer for its shard now: another one does, or will in a moment."""


class CoordinatorUnreachable(FleetError):
    """Nobody can be asked who is primary: nothing is known about it for now."""


class ServerError(FleetError):
    """A server answered a request with an error."""


class ServerUnreachable(FleetError):
    """A server gave no answer within the time-out."""


class ServerRestarted(FleetError):
    """A server came back as another process: what it held before is gone."""


class DataError(FleetError):
    """Data that cannot be read as it should: the message says where, what was expected and what was found."""


class CheckpointError(FleetError):
    """A saved model that cannot be read or written; the message names the file."""


class LogError(FleetError):
    """A server's log that cannot be read, continued or followed; the message names the file and the place."""


class LogStuck(ServerBusy):
    """A server cannot write its log now, and so promises nothing. It goes on when it can."""
