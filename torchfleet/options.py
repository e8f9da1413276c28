"""Every collective field of DistributedStrategy as a flag of a script's command line (base/strategy/flags.py)."""

from __future__ import annotations

from torchfleet.base.strategy.flags import HELP, HelpFormatter, add_arguments, strategy_of

__all__ = ["HELP", "HelpFormatter", "add_arguments", "strategy_of"]
