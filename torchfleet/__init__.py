"""Fleet for PyTorch: parameter-server and collective training. `import torchfleet as fleet`.

`__init__.pyi` lists the public names and the modules that define them. A name is imported on first use, so that a bare
server (python -m torchfleet.server) never imports torch.
"""

from __future__ import annotations

from torchfleet.base import lazy_names, paddle_names

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_names.attach(__name__, __file__, paddle_names.FLEET)
