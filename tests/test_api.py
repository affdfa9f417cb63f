"""The rules of the public interface: documented, with examples that run, arrays positional, imports in one direction.

A public name is a module-level function, class or constant without an underscore, defined in that module.
"""

import ast
import dataclasses
import doctest
import graphlib
import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest

import pols_jax

PACKAGE = Path(pols_jax.__file__).parent

# A module imports only from modules before it; modules that are not named here may stand anywhere without a cycle.
ORDER = (
    *(
        "precision",
        "checks",
        "class_stats",
        "device_axes",
        "global_batch",
        "losses",
        "linear_stats",
        "linear_losses",
        "sampled_losses",
        "heads",
        "sharded_head",
        "principle",
        "metrics",
    ),
    *("data", "models"),
    *(
        "config",
        "optimizers",
        "checkpoints",
        "progress",
        "linear_output",
        "learning",
        "trainer",
        "mesh_training",
    ),
    *(
        "training",
        "experiments",
        "runs",
        "class_blocks",
        "thresholds",
        "evaluation",
        "class_bank",
        "searching",
    ),
    *("slc_tables", "figures", "benchmarking", "experiment_records"),
    *("results_tables", "results_figures", "reporting", "cli"),
)
# What people import into their own programs: these stand on nothing but modules that `ORDER` names before them.
LIBRARY = ORDER[: ORDER.index("config")]
# Modules whose functions take arrays: those come first, positionally; everything else is keyword-only.
ARRAY_MODULES = ("losses", "linear_losses", "heads", "principle", "metrics")
ARRAYS = {
    *("logits", "scores", "labels", "features", "kernel", "bias", "class_ids", "aligned", "not_aligned"),
    *("recall",),  # by contract: precision_at_recall(scores, labels, recall) reads as it is said
    *(
        "name",
        "num_classes",
    ),  # the one thing that a factory makes something of: make_loss(name), prior_bias(k)
    *("z", "s", "batch"),  # the statistics that a formula is written in, in the place of its arrays
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


@pytest.mark.parametrize("short_name", [n for n in ARRAY_MODULES if f"pols_jax.{n}" in existing_modules()])
def test_arrays_are_positional_and_everything_else_is_keyword_only(short_name):
    wrong = []
    for name, value in public_names(f"pols_jax.{short_name}"):
        if inspect.isclass(value):
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


def test_imports_form_no_cycle():
    graphlib.TopologicalSorter(import_graph()).prepare()


def test_a_module_depends_only_on_modules_that_stand_before_it():
    graph = import_graph()
    for module in ORDER:
        waiting, reached = list(graph.get(module, ())), set()
        while waiting:
            other = waiting.pop()
            if other not in reached:
                reached.add(other)
                waiting += graph[other]
        allowed = ORDER[: ORDER.index(module)]
        assert not [other for other in reached if other in ORDER and other not in allowed], module
        if module in LIBRARY:
            assert reached <= set(allowed), (
                f"{module} is part of the library and depends on {reached - set(allowed)}"
            )


def test_data_and_models_do_not_know_each_other():
    graph = import_graph()
    assert "models" not in graph["data"]
    assert "data" not in graph["models"]
