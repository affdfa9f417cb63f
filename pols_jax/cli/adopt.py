"""``pols adopt``: one logit as good as all of them, for a network that was trained elsewhere."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import tyro

from pols_jax.cli.compiling import keep_compiled_programs
from pols_jax.cli.flags import Page, parse
from pols_jax.cli.running import announce
from pols_jax.errors import ConfigError, unknown_name

_ARRAYS = ("kernel", "bias", "features", "validation_features", "validation_labels", "names")


@dataclasses.dataclass(frozen=True)
class Flags:
    """Take over a network that was trained elsewhere.

    Attributes:
      file: An .npz or .safetensors file with the arrays kernel, bias, features, validation_features and
        validation_labels, of which all but kernel may be missing; an .npz file may hold names as well.
      out: The directory to write; it must not exist yet.
      kernel_layout: Whether kernel has one row per class (kd, as in PyTorch) or one column (dk, as in Keras and Flax).
      names: The names of the classes: a JSON list, or a text file with one name per line; by default the class ids.
      rows: The normalizer: choose tries none, affine, 256 and 1,024 rows; or one of none, affine, and a number of rows.
      seed: Decides start and order of the fits.
      quiet: No progress bar.
      compilation_cache: Keep compiled programs for the next start.
    """

    file: tyro.conf.Positional[Path]
    out: Path | None = None
    kernel_layout: Literal["kd", "dk"] = "kd"
    names: Path | None = None
    rows: str = "choose"
    seed: int = 0
    quiet: bool = False
    compilation_cache: bool = True


PAGE = Page(
    "pols adopt",
    "FILE --out DIR [FLAGS]",
    "Take over a network that was trained elsewhere: its output layer, and features of examples, give one logit that is nearly "
    "as good as all of them. It takes no labels and no new training. With validation labels, thresholds are chosen as well.",
    """
pols adopt network.npz --out adopted
pols adopt head.safetensors --kernel-layout dk --names classes.txt --out adopted
pols eval adopted                  # the table again
""",
    {
        "what to take over": "file kernel_layout names",
        "what to fit": "rows seed",
        "output": "out quiet compilation_cache",
    },
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Takes over what the flags name."""
    flags = parse(Flags, arguments, PAGE)
    if flags.out is None:
        raise ConfigError("Say where to write it: --out DIR.")
    announce("starting JAX ...")
    if flags.compilation_cache:
        keep_compiled_programs()
    from pols_jax.array_files import read_array_file, read_names
    from pols_jax.evaluation.adopting import adopt, ladder_table
    from pols_jax.evaluation.foreign_heads import ForeignHead
    from pols_jax.evaluation.normalizing import check_rows
    from pols_jax.files import check_new
    from pols_jax.tables import print_tables

    check_rows(flags.rows, or_none=True)
    check_new(flags.out)
    names = None if flags.names is None else read_names(flags.names)
    announce(f"reading {flags.file} ...")
    arrays = read_array_file(flags.file)
    try:
        head = ForeignHead.checked(**_arguments(arrays, names, flags))
        if head.features is None and flags.rows != "none":
            raise ConfigError(
                "there is no array features to fit a normalizer to; add it, or give --rows none."
            )
        announce("fitting ...")
        info = adopt(head, flags.out, rows=flags.rows, seed=flags.seed, quiet=flags.quiet)
    except ConfigError as error:
        raise ConfigError(f"{flags.file}: {error}") from error
    print_tables([ladder_table(info, title=str(flags.out))])
    print(f'Next, in Python: ClassBank.open("{flags.out}", features_of=...)', flush=True)


def _arguments(arrays: dict[str, Any], names: list[str] | None, flags: Flags) -> dict[str, Any]:
    """The arrays of a file, as the checks take them."""
    for name, array in arrays.items():
        if name not in _ARRAYS:
            raise ConfigError(unknown_name("array", name, _ARRAYS))
        if array.dtype.kind == "V" and array.dtype.name != "bfloat16":  # what npz makes of bfloat16
            raise ConfigError(
                f"{name} has a type that npz cannot keep; save it as float32, or as safetensors."
            )
    if "kernel" not in arrays:
        raise ConfigError("there is no array kernel, the output layer.")
    is_transposed = flags.kernel_layout == "dk"
    validation = tuple(arrays.get(f"validation_{part}") for part in ("features", "labels"))
    if (validation[0] is None) != (validation[1] is None):
        raise ConfigError(
            "validation_features and validation_labels belong together; one of them is missing."
        )
    if names is not None and "names" in arrays:
        raise ConfigError("it holds names, and --names gives others; give one of them.")
    return {
        "kernel": arrays["kernel"].T if is_transposed else arrays["kernel"],
        "bias": arrays.get("bias"),
        "class_names": arrays.get("names") if names is None else names,
        "features": arrays.get("features"),
        "validation": None if validation[0] is None else validation,
        "transpose": f"give --kernel-layout {'kd' if is_transposed else 'dk'}",
    }
