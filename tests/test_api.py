"""The rules of the public interface: documented, with examples that run, arrays positional, imports in one direction.

A public name is a module-level function, class or constant without an underscore, defined in that module.
"""

import ast
import dataclasses
import doctest
import importlib
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import pols_jax
from pols_jax.losses import LOSSES

PACKAGE = Path(pols_jax.__file__).parent

# Data flows down this list: a package imports only from those before it.
ORDER = (
    *(
        "errors",
        "files",
        "schema",
        "settings",
        "array_files",
        "memory",
        "class_shares",
        "signals",
        "tables",
        "losses",
        "heads",
        "principle",
        "normalizers",
        "metrics",
    ),
    *("data", "models", "training", "evaluation", "search", "benchmarking", "cli"),
)
# What people import into their own programs.
LIBRARY = ORDER[ORDER.index("losses") : ORDER.index("training")]
# Modules whose functions take arrays: those come first, positionally; everything else is keyword-only.
ARRAY_MODULES = ("losses", "heads", "principle", "normalizers", "metrics")
ARRAYS = {
    *("logits", "scores", "labels", "features", "kernel", "bias", "class_ids", "aligned", "not_aligned"),
    *("normalizer",),  # fold(normalizer, kernel, bias)
    *("recall",),  # by contract: precision_at_recall(scores, labels, recall) reads as it is said
    *(
        "name",
        "num_classes",
    ),  # the one thing that a factory makes something of: make_loss(name), prior_bias(k)
}


def existing_modules():
    return [
        module.name
        for module in pkgutil.walk_packages([str(PACKAGE)], "pols_jax.")
        if module.name != "pols_jax.__main__"
    ]


def top_level(module_name: str) -> str:
    """`pols_jax.data.glyphs` -> `data`."""
    return module_name.split(".")[1]


def public_names(module_name: str):
    """(name, object) of the functions and classes, jitted or wrapped ones too, that the module itself defines."""
    module = importlib.import_module(module_name)
    for name, value in vars(module).items():
        is_routine = callable(value) and hasattr(value, "__name__")
        if not name.startswith("_") and is_routine and getattr(value, "__module__", None) == module_name:
            yield name, value


def needs_example(name: str, value) -> bool:
    """Every public function and class, but for four kinds.

    A Protocol or an abstract base has nothing to run; an exception says what it is in its message; a record without
    methods is shown by the function that makes it; `main` is a command line, and a `*_formula` is the body of the loss
    whose name it has: its example is that loss's.
    """
    is_class = inspect.isclass(value)
    is_interface = getattr(value, "_is_protocol", False) or inspect.isabstract(value)
    is_exception = is_class and issubclass(value, BaseException)
    is_record = is_class and (hasattr(value, "_fields") or dataclasses.is_dataclass(value))
    has_methods = is_class and any(
        inspect.isfunction(m) and not n.startswith("_") for n, m in vars(value).items()
    )
    is_part = name == "main" or name.endswith("_formula")
    return not (is_interface or is_exception or (is_record and not has_methods) or is_part)


@pytest.mark.parametrize("module_name", existing_modules())
def test_every_module_and_every_public_name_and_method_has_a_docstring(module_name):
    assert (importlib.import_module(module_name).__doc__ or "").strip(), module_name
    without = []
    for name, value in public_names(module_name):
        if not (value.__doc__ or "").strip():
            without.append(name)
        if inspect.isclass(value):
            without += [
                f"{name}.{method}"
                for method, member in vars(value).items()
                if not method.startswith("_")
                and inspect.isfunction(member)
                and not inspect.getdoc(getattr(value, method))
            ]
    assert not without


@pytest.mark.parametrize("module_name", [name for name in existing_modules() if top_level(name) in LIBRARY])
def test_every_public_function_and_class_of_the_library_has_an_example_that_doctest_finds(module_name):
    module = importlib.import_module(module_name)
    found = {test.name for test in doctest.DocTestFinder(exclude_empty=True).find(module) if test.examples}
    missing = [
        name
        for name, value in public_names(module_name)
        if needs_example(name, value) and f"{module_name}.{name}" not in found
    ]
    assert not missing


@pytest.mark.parametrize("short_name", ARRAY_MODULES)
def test_arrays_are_positional_and_everything_else_is_keyword_only(short_name):
    wrong = []
    module = importlib.import_module(f"pols_jax.{short_name}")
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value) or not callable(value):
            continue
        for parameter in inspect.signature(value).parameters.values():
            positional = parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
            if (
                positional != (parameter.name in ARRAYS)
                and parameter.kind is not inspect.Parameter.VAR_KEYWORD
            ):
                wrong.append(f"{name}({parameter.name})")
    assert not wrong


def imports_of(path: Path):
    """The top-level modules of the package that a file imports, wherever in the file it does so."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: imports are absolute, so that their direction can be read"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name.split(".")[1] for name in names if name.startswith("pols_jax."))


def import_graph() -> dict[str, set[str]]:
    graph: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        module = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        graph.setdefault(module, set()).update(set(imports_of(path)) - {module, "__version__"})
    return graph


def test_a_package_imports_only_from_those_above_it():
    graph = import_graph()
    assert set(graph) - {"__init__"} == set(ORDER)
    for place, package in enumerate(ORDER):
        assert graph[package] <= set(ORDER[:place]), package


def test_data_and_models_do_not_know_each_other():
    graph = import_graph()
    assert "models" not in graph["data"]
    assert "data" not in graph["models"]


def loaded_by(statement: str) -> set[str]:
    program = f"import sys; {statement}; print(*sys.modules)"
    output = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout
    return {name.split(".")[0] for name in output.split()}


def test_importing_the_package_and_its_losses_loads_nothing_heavy():
    heavy = {"flax", "optax", "orbax", "tensorflow_datasets", "matplotlib", "grain", "tyro", "rich", "PIL"}
    assert not loaded_by("import pols_jax, pols_jax.losses; pols_jax.cross_entropy") & heavy
    assert "jax" not in loaded_by("import pols_jax; dir(pols_jax)")


def test_asking_a_class_of_a_run_loads_neither_data_sets_nor_what_trains_and_draws():
    heavy = {
        "optax",
        "orbax",
        "tensorflow_datasets",
        "grain",
        "matplotlib",
        "fontTools",
        "tyro",
        "PIL",
        "sklearn",
    }
    loaded = loaded_by("import pols_jax; pols_jax.ClassBank")
    assert "flax" in loaded
    assert not loaded & heavy


def test_every_name_of_the_surface_is_there_and_is_the_one_of_its_own_module():
    for name in dir(pols_jax):
        assert getattr(pols_jax, name) is not None
    assert {
        *LOSSES,
        "LOSSES",
        "ALIGNED",
        "make_loss",
        "LinearLogits",
        "ClassBank",
        "ClassHead",
        "load",
    } <= set(dir(pols_jax))
    assert pols_jax.batch_cross_entropy is pols_jax.losses.batch_cross_entropy
    with pytest.raises(AttributeError):
        _ = pols_jax.no_such_name


@pytest.mark.parametrize("package", [name for name in ORDER if name not in ("benchmarking", "cli")])
def test_a_package_says_what_it_offers_and_offers_what_it_says(package):
    module = importlib.import_module(f"pols_jax.{package}")
    missing = [name for name in module.__all__ if not hasattr(module, name)]
    assert module.__all__, f"pols_jax.{package} says nothing of what it offers"
    assert not missing
