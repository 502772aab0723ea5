"""The best split of every layer on a cluster, why it was chosen, and how to change it.

    python examples/02_best_plan.py

No worker runs here: a plan is found from descriptions of the model and of the cluster.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import shardwise


def main() -> None:
    model = shardwise.zoo.build("alexnet", num_classes=100)
    x = torch.zeros(64, 3, 224, 224)
    plan = shardwise.plan(model, x, cluster="4x10Gb", memory="2GiB")  # 4 hosts, 10 Gbit/s
    print(plan)

    layer = "classifier.2"  # the first fully connected one
    print(f"\nalternatives of {layer}, all other layers as planned:")
    for choice in plan.explain(layer)[:4]:
        print(f"  {choice.config!s:<16} {1e3 * choice.total:7.2f} ms")

    with TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        plan.save(path)
        data = json.loads(path.read_text())
        data["layers"][layer] = {"f": 2}  # two workers, half of the filters each
        path.write_text(json.dumps(data))
        edited = shardwise.Plan.load(path)
    edited.check(shardwise.capture(model, x))  # names the layer where it cannot be run
    print(f"\nas edited, {layer} is split {edited.layers[layer]}")


if __name__ == "__main__":
    main()
