"""What `test_host_meshes` starts on every host: trains on each split of a mesh, and with drawn classes, step by step."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from pols_jax.training.config import RunConfig
from pols_jax.training.hosts import joined

# 94 classes: not a multiple of the class parts. Momentum, because Adam would blow rounding errors up.
CONFIG = RunConfig(
    characters="0021-007E",
    width=0.05,
    batch_size=32,
    loss="noise_contrastive_estimation",
    optimizer="momentum",
    learning_rate=0.05,
    head="sharded",
)
SAMPLED = dataclasses.replace(CONFIG, head="sampled", num_noise=10)
MESHES = {"4x1": "data=4,class=1", "2x2": "data=2,class=2", "1x4": "data=1,class=4"}
STEPS = 4


def train_all(folder: Path) -> None:
    import jax

    from pols_jax.data import load
    from pols_jax.training import stored_arrays
    from pols_jax.training.checkpoints import Checkpoints
    from pols_jax.training.trainer import Trainer

    stored_arrays._CHUNK_BYTES = 2 * 4 * 25  # chunks of two rows: every host writes its own
    dataset = load("glyphs", **CONFIG.options())
    found = {}
    for name, mesh in MESHES.items():
        trainer = Trainer(dataclasses.replace(CONFIG, mesh=mesh), dataset)
        state, losses = trainer.init(), []
        held = sum(
            len({str(shard.index) for shard in leaf.addressable_shards})
            * leaf.addressable_shards[0].data.shape[0]
            for leaf in [state.params["head"]["kernel"]]
        )
        with Checkpoints(folder / name, keep=9) as checkpoints:
            for step in range(1, STEPS + 1):
                state, totals = trainer.advance(state, step)
                losses.append(float(totals.last_loss))
            stored = trainer.stored(state)
            written = sum(len(chunk) for _, chunk in stored.params["head"]["kernel"].chunks())
            checkpoints.save(STEPS, stored, config={})
            checkpoints.wait()
            # What one mesh stored, the next one reads.
            previous = list(MESHES)[list(MESHES).index(name) - 1]
            other = folder / previous
            if (other / "checkpoints").exists():
                with Checkpoints(other) as others:
                    state = trainer.place(others.restore_newest(trainer.template()).state)
                state, totals = trainer.advance(state, STEPS + 1)
                losses.append(float(totals.last_loss))
        found[name] = {
            "losses": losses,
            "rows held": held,
            "rows written": written,
            "validation": trainer.validate(state),
        }
    found["sampled"] = train_sampled(folder, dataset)
    (folder / f"found-{jax.process_index()}.json").write_text(json.dumps(found))


def train_sampled(folder: Path, dataset: Any) -> dict[str, Any]:
    from pols_jax.training.checkpoints import Checkpoints
    from pols_jax.training.trainer import Trainer

    trainer = Trainer(SAMPLED, dataset)
    state, losses = trainer.init(), []
    for step in range(1, STEPS + 1):
        state, totals = trainer.advance(state, step)
        losses.append(float(totals.last_loss))
    with Checkpoints(folder / "sampled") as checkpoints:
        checkpoints.save(STEPS, trainer.stored(state), config={})
        checkpoints.wait()
    return {"losses": losses, "validation": trainer.validate(trainer.caught_up(state))}


if __name__ == "__main__":
    out, *place = sys.argv[1:]
    options = {}
    if place:
        options = {"coordinator": place[0], "num_processes": 2, "process_id": int(place[1])}
    with joined(**options):
        train_all(Path(out))
