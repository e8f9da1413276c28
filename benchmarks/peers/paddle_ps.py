"""Paddle 2.6's parameter server: one server and one worker, a_sync.

pip install --target DIR paddlepaddle==2.6.2 'numpy<2' 'protobuf<5' setuptools: it needs packages older than others.

The same rows and network in Paddle's static graph. Rows are updated by the Adam of its table's accessor, the tower by
Adam on the server. Paddle's server does not end by itself.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import numpy as np

from benchmarks.peers import clicks


def main() -> None:
    chosen = clicks.options()
    _describe_role(chosen)
    import paddle
    from paddle.distributed import fleet

    paddle.enable_static()
    paddle.seed(chosen.seed)
    fleet.init(is_collective=False)
    loss, score = _network(paddle, chosen)
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = True
    fleet.distributed_optimizer(paddle.optimizer.Adam(learning_rate=clicks.ADAM), strategy).minimize(loss)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()  # it does not end by itself
        return
    executor = paddle.static.Executor(paddle.CPUPlace())
    executor.run(paddle.static.default_startup_program())
    fleet.init_worker()
    found = _trained(paddle, executor, loss, chosen)
    found["auc"] = _auc(paddle, executor, score, chosen)
    clicks.tell(found)
    fleet.stop_worker()


def _describe_role(chosen: argparse.Namespace) -> None:
    """As Paddle's launcher does, in the environment."""
    place = f"127.0.0.1:{chosen.port}"
    os.environ.update(
        {
            "TRAINING_ROLE": "PSERVER" if chosen.role == "server" else "TRAINER",
            "PADDLE_PSERVERS_IP_PORT_LIST": place,
            "PADDLE_TRAINERS_NUM": "1",
            "PADDLE_TRAINER_ID": "0",
            "PADDLE_TRAINER_ENDPOINTS": f"127.0.0.1:{chosen.port + 1}",
            "POD_IP": "127.0.0.1",
            "PADDLE_PORT": str(chosen.port),
            "PADDLE_WITH_GLOO": "0",
            "OMP_NUM_THREADS": str(chosen.threads),
        }
    )


def _network(paddle: Any, chosen: argparse.Namespace) -> tuple[Any, Any]:
    ids = paddle.static.data("ids", [-1, 1], "int64")  # its lookups want one id per line
    dense = paddle.static.data("dense", [-1, clicks.NUM_DENSE], "float32")
    label = paddle.static.data("label", [-1, 1], "float32")
    first = paddle.nn.initializer.Uniform(-clicks.INITIAL, clicks.INITIAL)
    rows = paddle.static.nn.sparse_embedding(
        ids, size=[clicks.num_rows(chosen), chosen.dim], param_attr=paddle.ParamAttr(name="rows", initializer=first)
    )
    flat = paddle.concat([paddle.reshape(rows, [-1, clicks.NUM_IDS * chosen.dim]), dense], axis=1)
    hidden = paddle.static.nn.fc(flat, clicks.HIDDEN, activation="relu")
    logit = paddle.static.nn.fc(hidden, 1)
    loss = paddle.mean(paddle.nn.functional.binary_cross_entropy_with_logits(logit, label))
    return loss, logit


def _trained(paddle: Any, executor: Any, loss: Any, chosen: argparse.Namespace) -> dict[str, float]:
    rows = clicks.share(chosen)
    first = clicks.WARM * chosen.batch
    warm, own = (tuple(column[some] for column in rows) for some in (slice(0, first), slice(first, None)))

    def train(data: Any) -> None:
        for batch in clicks.batches(data, chosen.batch):
            executor.run(paddle.static.default_main_program(), feed=_feed(*batch), fetch_list=[loss])

    num = len(own[0]) // chosen.batch * chosen.batch
    return clicks.timed(train, warm, own, num)


def _feed(ids: Any, dense: Any, label: Any) -> dict[str, Any]:
    return {"ids": ids.reshape(-1, 1), "dense": dense, "label": label.reshape(-1, 1)}


def _auc(paddle: Any, executor: Any, score: Any, chosen: argparse.Namespace) -> float:
    """Of rows that it has not seen. The clone still pushes, and has no gradients to push: pruning takes that out."""
    rows = clicks.held_out(chosen)
    program = paddle.static.default_main_program().clone(for_test=True)
    found = [
        executor.run(program, feed=_feed(*batch), fetch_list=[score], use_prune=True)[0]
        for batch in clicks.batches(rows, chosen.batch)
    ]
    scores = np.concatenate(found)
    return clicks.auc(scores, rows[2][: len(scores)])


if __name__ == "__main__":
    main()
