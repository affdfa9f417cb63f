"""Where training starts from: the weights of a run, or of a file as torchvision and timm publish them.

The weights are copied to ``init.npz`` in the directory of the experiment: whoever goes on with it needs nothing else.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from pols_jax.array_files import read_array_file
from pols_jax.data import Dataset
from pols_jax.errors import ConfigError, reason_of
from pols_jax.files import read_bytes, write_arrays
from pols_jax.models import PUBLISHED, num_published_classes, published_variables
from pols_jax.schema import decode, encode, npz_arrays
from pols_jax.training.config import Experiment, RunConfig
from pols_jax.training.features import feature_dataset
from pols_jax.training.learning import TrainState
from pols_jax.training.network import make_model, variable_shapes
from pols_jax.training.run_files import StartInfo
from pols_jax.training.runs import Run, find_run

_NAME = "init.npz"
_MAX_BYTES = 2**40


@dataclasses.dataclass
class Start:
    """Weights to start from.

    Attributes:
      info: Where they come from.
      variables: Those of the backbone; and of the output layer, if its classes are the same.
    """

    info: StartInfo
    variables: dict[str, Any]
    _features: Dataset | None = None

    def features(self, config: RunConfig, dataset: Dataset, report: Any) -> Dataset:
        """The features of a data set; computed for the first run of an experiment, and kept for the others."""
        if self._features is None:
            backbone = {name: tree["backbone"] for name, tree in self.variables.items()}
            self._features = feature_dataset(config, dataset, backbone, report=report)
        return self._features

    def with_backbone(self, state: TrainState) -> TrainState:
        """The state of a whole network, from one of the output layer alone."""
        params = self.variables["params"] | state.params
        return state._replace(params=params, batch_stats=self.variables.get("batch_stats", {}))

    def save(self, run_dir: Path) -> None:
        """Writes ``init.npz``, once."""
        if not (run_dir / _NAME).exists():
            flat = flax.traverse_util.flatten_dict(self.variables, sep="/")
            write_arrays(run_dir / _NAME, flat | {"info": np.array(json.dumps(encode(self.info)))})


def with_weights(
    state: TrainState, variables: dict[str, Any], init_optimizer: Callable[[Any], Any]
) -> TrainState:
    """The state before the first step, with the variables of a `Start` in the places of random ones."""
    params = _over(state.params, variables["params"])
    batch_stats = _over(state.batch_stats, variables.get("batch_stats", {}))
    return state._replace(params=params, batch_stats=batch_stats, opt_state=init_optimizer(params))


def without_backbone(state: TrainState) -> TrainState:
    """The state of the output layer alone, from one of a whole network."""
    return state._replace(params={"head": state.params["head"]}, batch_stats={})


def load_start(setup: RunConfig | Experiment, dataset: Dataset, run_dir: str | Path) -> Start | None:
    """Reads what ``setup.init_from`` names; None if it names nothing.

    Args:
      setup: The settings.
      dataset: The data of the runs, which decides whether the output layer is taken over.
      run_dir: Where the runs are written. If it holds the weights already, nothing else is read.

    Raises:
      ConfigError: if there is nothing, it cannot be read, or does not fit the network: the sentence names the layer.
      RunError: if it is a run that cannot be used.
    """
    if setup.init_from is None:
        return None
    kept = _read_kept(Path(run_dir) / _NAME)
    if kept is not None and kept.info.path == setup.init_from:
        return kept
    config = setup.runs()[0]
    shapes = variable_shapes(make_model(config, dataset.num_classes), dataset.image_shape)
    path = Path(setup.init_from)
    if not path.exists():
        raise ConfigError(f"--init-from {path} is not there; name a run directory or a file with weights.")
    try:
        return (_of_run if path.is_dir() else _of_file)(path, config, dataset, shapes)
    except ConfigError as error:
        raise ConfigError(f"--init-from: {error}") from error


def _of_run(path: Path, config: RunConfig, dataset: Dataset, shapes: Any) -> Start:
    run = Run.open(find_run(path), use="best")
    if run.config.model != config.model:
        raise ConfigError(f"{path} holds a {run.config.model}; add --model {run.config.model}.")
    variables = {name: {"backbone": tree} for name, tree in run.restore_backbone().items()}
    has_same_classes = run.class_names == dataset.class_names
    if has_same_classes:
        variables["params"]["head"] = dict(zip(("kernel", "bias"), run.restore_head(), strict=True))
    _check_shapes(path, variables, shapes)
    info = _info(path, run.checkpoint, run.config.pixels, has_same_classes, run.num_classes, dataset)
    return Start(info, variables)


def _of_file(path: Path, config: RunConfig, dataset: Dataset, shapes: Any) -> Start:
    if config.model not in PUBLISHED:
        names = ", ".join(PUBLISHED)
        raise ConfigError(f"{path} is a file, as published for {names}, and not for --model {config.model}.")
    readers = {".safetensors": read_array_file, ".pth": _torch_arrays, ".pt": _torch_arrays}
    if path.suffix not in readers:
        raise ConfigError(f"{path} must be a run directory, or a .safetensors or .pth file.")
    arrays = readers[path.suffix](path)
    taken = published_variables(arrays, shapes, model=config.model, source=str(path))
    variables = jax.tree.map(lambda array: np.ascontiguousarray(array, np.float32), taken)
    if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(variables)):
        raise ConfigError(f"{path} holds numbers that are not finite.")
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    pixels, num_classes = PUBLISHED[config.model], num_published_classes(arrays)
    is_kept = "head" in variables["params"]
    return Start(_info(path, sha256, pixels, is_kept, num_classes, dataset), variables)


def _info(
    path: Path, identity: str, pixels: str | None, is_kept: bool, num_classes: int | None, dataset: Dataset
):
    ours = f"{dataset.num_classes:,} classes"
    if is_kept:
        what = f"backbone and head from {path} ({ours})"
    else:
        what = f"backbone from {path}, head new ({f'{num_classes:,} -> ' * (num_classes is not None)}{ours})"
    return StartInfo(path=str(path), identity=identity, pixels=pixels or "symmetric", what=what)


def _check_shapes(path: Path, variables: Any, shapes: Any) -> None:
    """Raises a `ConfigError` that names the first layer of a backbone that is missing, not known, or does not fit."""
    found: dict[str, Any]
    wanted: dict[str, Any]
    found, wanted = (flax.traverse_util.flatten_dict(dict(tree), sep="/") for tree in (variables, shapes))
    names = {*found, *(name for name in wanted if "/backbone/" in name)}
    for name in sorted(names, key=lambda name: (name.startswith("batch_stats"), name)):
        if name not in found and "/auxiliary" not in name:
            raise ConfigError(f"{path} does not fit: {name} is missing.")
        if name in found and (name not in wanted or found[name].shape != wanted[name].shape):
            here = f"{list(wanted[name].shape)} here" if name in wanted else "not known here"
            raise ConfigError(f"{path} does not fit: {name} is {list(found[name].shape)} there and {here}.")


def _torch_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file that PyTorch wrote."""
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ConfigError(
            f"{path} needs PyTorch to be read: pip install torch, or save it as .safetensors."
        ) from None
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        content = next((content[key] for key in ("state_dict", "model") if key in content), content)
        return {name.removeprefix("module."): tensor.float().numpy() for name, tensor in content.items()}
    except Exception as error:  # whatever a file that holds something else makes PyTorch raise
        raise ConfigError(f"{path} cannot be read: it is damaged, or holds more than weights.") from error


def _read_kept(path: Path) -> Start | None:
    if not path.exists():
        return None
    try:
        arrays = npz_arrays(read_bytes(path, max_bytes=_MAX_BYTES))
        info: StartInfo = decode(StartInfo, json.loads(str(arrays.pop("info"))))
        return Start(info, flax.traverse_util.unflatten_dict(arrays, sep="/"))
    except Exception as error:  # whatever a damaged file makes the libraries raise
        raise ConfigError(
            f"{path} cannot be read: it is damaged ({reason_of(error)}); delete it to start from --init-from again."
        ) from error


def _over(tree: Any, part: Any) -> Any:
    """A tree of parameters, with those of another one in their places."""
    if not isinstance(tree, dict):
        return jnp.asarray(part)
    return {name: _over(leaf, part[name]) if name in part else leaf for name, leaf in tree.items()}
