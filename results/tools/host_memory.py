"""How much memory does a host need to create, store and open an output layer that it has a part of?

    python results/tools/host_memory.py results/host_memory.json

Two hosts, processes of this machine with one CPU device each, share out k classes with d = 256 features and momentum. For
each k and host: the bytes of its rows, and the peak of the resident memory above what the process had before, while the rows
are created, stored and opened again. In the end one row is read, and the bytes that were read are counted.
"""

import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

NUM_FEATURES = 256
NUM_HOSTS = 2


class Peak:
    """The peak of the resident memory since it was made, above what there was; in bytes."""

    def __init__(self):
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        self._before = self._status("VmRSS")

    def bytes(self) -> int:
        """How far the memory went up so far."""
        return self._status("VmHWM") - self._before

    def _status(self, name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def measure_host(num_classes: int, folder: Path) -> None:
    """Creates, stores and opens the rows of this host; writes what it found."""
    import jax
    import numpy as np
    import tensorstore

    from pols_jax.data import ArraySplit, Dataset
    from pols_jax.training.checkpoints import Checkpoints, HeadRows
    from pols_jax.training.class_parallel import ClassParallel
    from pols_jax.training.config import RunConfig

    split = ArraySplit(np.zeros((4, NUM_FEATURES), np.float32), np.zeros(4, np.int32))
    names = tuple(map(str, range(num_classes)))
    dataset = Dataset("random", names, (NUM_FEATURES,), split, split, split, provenance={})  # type: ignore
    config = RunConfig(head="sharded", optimizer="momentum", batch_size=4, loss="cross_entropy")
    placement = ClassParallel(config, dataset)
    found: dict[str, Any] = {"host": jax.process_index(), "classes": num_classes}

    peak = Peak()
    state = placement.init(lambda _: placement.learner.init(dataset.image_shape), None)
    jax.block_until_ready(state)
    found["create"] = peak.bytes()
    found["rows"] = sum(
        shard.data.nbytes for leaf in jax.tree.leaves(state) for shard in leaf.addressable_shards
    )
    checksum = [float(np.sum(shard.data)) for shard in state.params["head"]["kernel"].addressable_shards]

    with Checkpoints(folder) as checkpoints:
        peak = Peak()
        checkpoints.save(1, placement.stored(state), config={})
        checkpoints.wait()
        found["store"] = peak.bytes()
    del state
    template = placement.template(jax.eval_shape(lambda: placement.learner.init(dataset.image_shape)))
    with Checkpoints(folder) as checkpoints:
        peak = Peak()
        saved = checkpoints.restore_newest(template)
        assert saved is not None
        state = placement.place(saved.state)
        del saved
        jax.block_until_ready(state)
        found["open"] = peak.bytes()
    assert checksum == [
        float(np.sum(shard.data)) for shard in state.params["head"]["kernel"].addressable_shards
    ]

    def bytes_read():
        counters = tensorstore.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
        return sum(value["value"] for counter in counters for value in counter["values"])

    before = bytes_read()
    HeadRows(folder).read([num_classes // 3])
    stored = sum(path.stat().st_size for path in folder.rglob("checkpoints/*/state/params.head.*/*"))
    found["row"] = {"bytes read": bytes_read() - before, "bytes of the layer": stored}
    (folder / f"{jax.process_index()}.json").write_text(json.dumps(found))


def measure(num_classes: int) -> list[dict]:
    """Starts both hosts, and returns what they found."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        free.close()
        hosts = [
            subprocess.Popen([sys.executable, __file__, str(num_classes), folder, address, str(index)])
            for index in range(NUM_HOSTS)
        ]
        assert [host.wait() for host in hosts] == [0] * NUM_HOSTS
        return [json.loads((Path(folder) / f"{index}.json").read_text()) for index in range(NUM_HOSTS)]


def main(path: Path) -> None:
    """Measures every size, and writes the record."""
    import jax

    from pols_jax.benchmarking.records import describe_environment

    hosts = [found for exponent in (16, 18, 20) for found in measure(2**exponent)]
    for found in hosts:
        print(
            {
                name: value / 1e6 if name in ("rows", "create", "store", "open") else value
                for name, value in found.items()
            }
        )
    record = {
        "environment": describe_environment(jax.local_devices()),
        "num_features": NUM_FEATURES,
        "num_hosts": NUM_HOSTS,
        "hosts": hosts,
    }
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    if len(sys.argv) == 2:
        main(Path(sys.argv[1]))
    else:
        os.environ.update(JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="1")
        from pols_jax.training.hosts import joined

        size, folder, address, index = sys.argv[1:]
        with joined(coordinator=address, num_processes=NUM_HOSTS, process_id=int(index)):
            measure_host(int(size), Path(folder))
