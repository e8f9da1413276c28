"""Fleet for PyTorch: parameter-server and collective training. `import torchfleet as fleet`.

`__init__.pyi` lists the public names and where each is defined. A name is imported when it is first used, so that a
bare server (python -m torchfleet.server) never imports torch.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

import lazy_loader

__version__ = "0.1.0"

_load, _, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __dir__() -> list[str]:
    """The public names, for completion; not what this file imports, nor modules that happen to be loaded."""
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])


def __getattr__(name: str) -> Any:
    if name in __all__:
        return _load(name)
    near = get_close_matches(name, __all__, n=1)
    advice = f"; did you mean '{near[0]}'?" if near else "; docs/reference/ lists its names"
    raise AttributeError(f"torchfleet has no '{name}'{advice}")
