"""Names that users of Paddle type: each works, or is an error or warning that says what to use instead."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import each_of
from support.messages import naming
from support.paths import ROOT

import torchfleet as fleet
from torchfleet.base import paddle_names
from torchfleet.base.errors import DataError, FleetError, StrategyError
from torchfleet.base.role.role_makers import UserDefinedRoleMaker
from torchfleet.base.strategy.paddle_fields import OLD_FIELDS
from torchfleet.launch.cli import main

PAGE = (ROOT / "docs" / "migrate" / "paddle.md").read_text()
DOCUMENTS = ROOT.parent / "shared" / "spec" / "seeds"  # absent on a user's machine
# Names in the listings of Paddle Fleet's documents, by what they are asked of.
LISTED = {
    "fleet": """DistributedStrategy MultiSlotDataGenerator distributed_optimizer init init_server init_worker
        is_first_worker is_server is_worker main_program metrics run_server save_persistables split_files
        startup_program stop_worker util worker_index worker_num""",
    "dataset": "init set_batch_size set_filelist set_pipe_command set_thread set_use_var",
    "role": "is_first_worker is_server is_worker worker_index",
    "metrics": "Loss Min acc auc mae max min mse rmse sum",
    "strategy": """_fuse_grad_size_in_TFLOPS a_sync a_sync_configs adaptive_localsgd adaptive_localsgd_configs amp
        amp_configs build_strategy dgc dgc_configs fuse_all_reduce_ops fuse_grad_size_in_MB geo_sgd_mode
        geo_sgd_need_push_nums hierarchical_allreduce_inter_nranks lamb lamb_configs lars lars_configs localsgd
        localsgd_configs nccl_comm_num pipeline pipeline_configs recompute recompute_configs runtime_split_send_recv
        sync_mode sync_nccl_allreduce use_hierarchical_allreduce""",
    "build_strategy": """enable_inplace fuse_all_optimizer_ops fuse_bn_act_ops fuse_broadcast_ops
        fuse_ewise_add_act_ops fuse_relu_depthwise_conv reduce_strategy""",
    "dist_infer": "get_dist_infer_program init_distributed_infer_env",
    "optimizer": "minimize",
}
TYPOS = {
    "mian_program",
    "save_persisitables",
    "run",
    "bj",
    "utilijN",
    "set",
}  # of the documents, or cut short there
OBJECTS: dict[str, Any] = {
    "fleet": fleet,
    "dataset": fleet.QueueDataset(),
    "role": UserDefinedRoleMaker(),
    "metrics": fleet.metrics,
    "strategy": fleet.DistributedStrategy(),
    "build_strategy": fleet.BuildStrategy(),
    "dist_infer": fleet.DistributedInfer(torch.nn.Linear(1, 1)),
}
HINTS = {
    "fleet": paddle_names.FLEET,
    "metrics": paddle_names.METRICS,
    "dataset": paddle_names.DATASET,
    "optimizer": paddle_names.OPTIMIZER,
    "dist_infer": paddle_names.INFER,
}


@each_of(("owner", "name"), [(owner, name) for owner in LISTED for name in LISTED[owner].split()])
def test_a_name_of_the_documents_works_or_says_what_to_use(owner: str, name: str) -> None:
    if owner in OBJECTS and hasattr(OBJECTS[owner], name):
        return
    if owner in ("strategy", "build_strategy"):
        with pytest.raises(StrategyError, match=re.escape(f"'{name}'; ") + "(?!it has)"):
            setattr(OBJECTS[owner], name, 1)
    else:
        assert name in HINTS[owner]


@pytest.mark.skipif(not DOCUMENTS.is_dir(), reason="needs the documents of Paddle Fleet")
def test_the_list_has_every_name_of_the_documents() -> None:
    text = "\n".join(file.read_text(errors="replace") for file in sorted(DOCUMENTS.glob("*.txt")))
    missing = {
        f"{owner}.{name}"
        for owner, listed in LISTED.items()
        for name in re.findall(rf"(?<![\w./]){owner}\.([A-Za-z_]\w*)(?=[\s(=)\],:;`])", text)
        if name not in listed.split() and name not in TYPOS
    }
    assert missing == set()
    flags = set(re.findall(r"FLAGS_\w+", text.replace("\\_", "_")))
    assert flags - set(paddle_names.FLAGS) == {"FLAGS_selected_gpus"}


def test_the_page_lists_every_name() -> None:
    tables: list[Any] = [paddle_names.FLEET, paddle_names.METRICS, paddle_names.OPTIMIZER, paddle_names.DATASET]
    tables += [paddle_names.INFER, paddle_names.OPTIONS, paddle_names.FLAGS, OLD_FIELDS]
    tables += [paddle_names.SAVING_INFERENCE, paddle_names.DATASET_PASS, paddle_names.INFERRING_ENV]
    assert [name for table in tables for name in table if not re.search(rf"(?<!\w){name}(?!\w)", PAGE)] == []


@each_of("name", paddle_names.FLEET)
def test_an_attribute_of_fleet_says_what_to_use(name: str) -> None:
    vars(fleet).pop(name, None)  # a submodule that another test has imported
    with pytest.raises(AttributeError, match=re.escape(paddle_names.FLEET[name])):
        getattr(fleet, name)


@pytest.mark.parametrize("name", paddle_names.OPTIONS)
def test_an_option_of_paddles_launchers_says_what_to_use(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    assert main([f"--{name}=1", "--dry_run", str(script)]) == 2
    assert paddle_names.OPTIONS[name] in capsys.readouterr().err


def test_variables_without_effect_are_told_at_init(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLAGS_rpc_retry_times", "3")
    monkeypatch.setenv("FLAGS_communicator_thread_pool_size", "5")
    monkeypatch.setenv("FLAGS_never_heard_of", "1")
    monkeypatch.setenv("FLAGS_selected_gpus", "0")
    fleet.init()
    told = [line for line in capsys.readouterr().err.splitlines() if "FLAGS_" in line]
    assert len(told) == 3
    assert "{'thread_pool_size': 5}" in told[0]
    assert "FLAGS_never_heard_of=1" in told[1]
    assert "strategy.rpc_retry_times = 3" in told[2]


@pytest.mark.parametrize(
    ("fields", "mode", "k_steps"),
    [
        ({}, "sync", 0),
        ({"sync_mode": False, "runtime_split_send_recv": True}, "async", 0),
        ({"sync_mode": False, "half_async": True}, "half_async", 0),
        ({"sync_mode": False, "geo_sgd_mode": True, "geo_sgd_need_push_nums": 400}, "geo", 400),
    ],
)
def test_a_transpiler_config_becomes_a_strategy(fields: dict[str, Any], mode: str, k_steps: int) -> None:
    config = fleet.DistributeTranspilerConfig()
    for name, value in fields.items():
        setattr(config, name, value)
    fleet.init()
    model = fleet.distributed_model(torch.nn.Linear(2, 1))
    fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), config)
    strategy = config.as_strategy("a test")
    assert (strategy.mode, strategy.a_sync_configs.k_steps) == (mode, k_steps)
    with pytest.raises(StrategyError, match="sync_mode"):
        config.sync_mode = True


def test_a_transpiler_config_that_contradicts_itself_is_refused() -> None:
    for name in ("geo_sgd_mode", "half_async", "runtime_split_send_recv"):
        with pytest.raises(StrategyError, match=naming(name, "sync_mode=False")):
            fleet.DistributeTranspilerConfig(**{name: True}).as_strategy("a test")
    with pytest.raises(StrategyError, match=naming("half_async", "geo_sgd_mode")):
        fleet.DistributeTranspilerConfig(sync_mode=False, half_async=True, geo_sgd_mode=True).as_strategy("a test")


def test_setters_of_a_dataset_are_its_init(tmp_path: Path) -> None:
    (tmp_path / "part").write_text("1 7\n1 8\n1 9\n")
    dataset = fleet.DatasetFactory().create_dataset("InMemoryDataset")
    dataset.set_batch_size(2)
    dataset.set_pipe_command("cat")
    dataset.set_use_var([fleet.Slot("ids", dim=1)])
    dataset.set_thread(1)
    dataset.set_filelist([str(tmp_path / "part")])
    dataset.load_into_memory()
    assert [batch["ids"].view(-1).tolist() for batch in dataset] == [[7, 8], [9]]
    dataset.set_batch_size(3)
    assert [batch["ids"].view(-1).tolist() for batch in dataset] == [[7, 8, 9]]
    for wrong in (fleet, -1, True):
        with pytest.raises(DataError, match="seed"):
            dataset.global_shuffle(wrong)  # type: ignore[arg-type]


@each_of("mode", [2, 3, True, "1", None])
def test_other_modes_of_a_save_are_errors(mode: Any) -> None:
    with pytest.raises(FleetError, match=naming("mode", 0, 1)):
        fleet.save_persistables("model", mode=mode)


def test_arguments_of_paddle_are_accepted_at_their_defaults_only() -> None:
    assert fleet.metrics.sum(2.0, scope=None, util=fleet.util) == 2.0
    assert fleet.metrics.auc([0, 1], [1, 0], util=None) == 1.0
    for wrong in ({"scope": object()}, {"util": torch}):
        with pytest.raises(FleetError, match=next(iter(wrong))):
            fleet.metrics.mae(1.0, 2, **wrong)
    with pytest.raises(FleetError, match="executor"):
        fleet.save_persistables(executor=object(), dirname="model")  # type: ignore[call-arg]
    with pytest.raises(FleetError, match="dirname"):
        fleet.save_persistables(None, "model")  # type: ignore[arg-type]
    with pytest.raises(FleetError, match="debug"):
        fleet.train_from_dataset(len, fleet.QueueDataset(), [], debug=True)  # type: ignore[call-arg]
