"""Every collective field of DistributedStrategy as a flag of a script's command line: torchfleet/strategy/flags.py."""

from __future__ import annotations

from torchfleet.strategy.flags import HELP, HelpFormatter, add_arguments, strategy_of

__all__ = ["HELP", "HelpFormatter", "add_arguments", "strategy_of"]
