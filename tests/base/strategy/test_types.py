"""What a type checker knows of a strategy: mypy reads a script as a user would write it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.extras import imported

import torchfleet

# A comment is what mypy must say of its line; without one it must say nothing.
SCRIPT = """
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.base.strategy.execution import BuildStrategy

strategy = DistributedStrategy(amp=True, amp_configs={"init_loss_scaling": 1024})

reveal_type(strategy.amp)  # Revealed type is "bool"
reveal_type(strategy.rpc_timeout)  # Revealed type is "float"
reveal_type(strategy.nccl_comm_num)  # Revealed type is "int"
reveal_type(strategy.amp_configs.init_loss_scaling)  # Revealed type is "float"
reveal_type(strategy.amp_configs.dtype)  # Revealed type is "str"
reveal_type(strategy.dgc_configs.sparsity)  # Revealed type is "list[float]"
reveal_type(strategy.a_sync_configs.k_steps)  # Revealed type is "int"
reveal_type(strategy.amp_configs["init_loss_scaling"])  # Revealed type is "Any"
reveal_type(strategy.build_strategy.fuse_bn_act_ops)  # Revealed type is "bool"

strategy.amp = False
strategy.rpc_timeout = 5
strategy.amp_configs = {"init_loss_scaling": 1024}
strategy.amp_configs = {**strategy.amp_configs, "incr_ratio": 4.0}
strategy.amp_configs = DistributedStrategy().amp_configs
strategy.amp_configs |= {"incr_ratio": 4.0}
strategy.build_strategy = BuildStrategy(fuse_bn_act_ops=True)
strategy.build_strategy = {"fuse_bn_act_ops": True}

strategy.amp = "yes"  # Incompatible types in assignment
strategy.nccl_comm_num = 1.5  # Incompatible types in assignment
strategy.amp_configs = [1]  # Incompatible types in assignment
strategy.ampp = True  # "DistributedStrategy" has no attribute "ampp"
strategy.amp_configs.no_such  # "AmpConfigs" has no attribute "no_such"
strategy.amp_configs.init_loss_scaling = 1024.0  # Incompatible types in assignment
strategy.amp_configs["init_loss_scaling"] = 1024.0  # Unsupported target for indexed assignment
"""


def said_by_mypy(path: Path, cache: Path) -> dict[int, str]:
    """Line of the script → what mypy says of it. Only the files of strategies are read with it, for speed."""
    base = Path(torchfleet.__file__).parent / "base"
    files = [path, base / "errors.py", *(base / "strategy").glob("*.py")]
    options = ["--strict", "--follow-imports=skip", "--config-file=", f"--cache-dir={cache}", "--no-error-summary"]
    text, errors, _ = imported("mypy.api").run([*options, *map(str, files)])
    assert not errors
    found: dict[int, str] = {}
    for line, said in re.findall(rf"^{re.escape(str(path))}:(\d+): \w+: (.*)$", text, re.MULTILINE):
        found[int(line)] = found.get(int(line), "") + said.replace("builtins.", "")  # older mypy prints it
    return found


@pytest.mark.slow
@pytest.mark.long
def test_mypy_knows_every_field_and_key(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    found = said_by_mypy(script, tmp_path / "cache")
    for number, line in enumerate(SCRIPT.splitlines(), start=1):
        _, _, expected = line.partition("  # ")
        assert (expected in found[number]) if expected else (number not in found), (line, found.get(number))
