"""The recipes of docs/your_network.md run, each where its package is installed; the rest of the page runs as a doctest."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest

from pols_jax import cli
from pols_jax.search.class_bank import ClassBank

PAGE = (Path(__file__).parents[2] / "docs" / "your_network.md").read_text()
RECIPES = {"PyTorch": ["torch"], "Keras": ["keras"], "ONNX": ["onnx", "onnxruntime"], "Flax": ["flax"]}


def programs(heading: str) -> str:
    """The code blocks of a section, but for those that doctest runs."""
    _, _, section = PAGE.partition(f"\n{heading}\n")
    blocks = re.findall(
        r"```python\n(.*?)```", re.split(r"^#{2,3} ", section, flags=re.MULTILINE)[0], re.DOTALL
    )
    return "\n".join(block for block in blocks if not block.startswith(">>>"))


@pytest.fixture
def jax_as_it_comes():
    """The rules of promotion that a reader has."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.usefixtures("jax_as_it_comes")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_takes_a_network_apart_and_the_bank_and_pols_adopt_take_what_it_gives(
    recipe, tmp_path, monkeypatch
):
    monkeypatch.setenv("KERAS_BACKEND", "jax")  # the one that is installed here
    for package in RECIPES[recipe]:
        pytest.importorskip(package, reason=f"{package} is not installed", exc_type=ImportError)
    monkeypatch.chdir(tmp_path)
    variables = {"__name__": "recipe"}
    for heading in ("## The recipes", f"### {recipe}", "### After any of them"):
        exec(compile(programs(heading), heading, "exec"), variables)
    bank, pictures = variables["bank"], variables["pictures"]
    raw = np.asarray(variables["own"])[:, 7]
    logits = bank.logits(pictures[:5], "class 7")
    estimates = 0 if bank.normalizer is None else np.asarray(bank.normalizer(bank.features(pictures[:5])))
    np.testing.assert_allclose(logits, raw - estimates, atol=1e-3)
    assert cli.main(["adopt", "network.npz", "--out", "adopted", "--quiet"]) == 0
    opened = ClassBank.open("adopted", features_of=variables["features_of"])
    np.testing.assert_allclose(opened.logits(pictures[:5], "class 7"), logits, atol=1e-5)


def test_every_recipe_of_the_page_is_run():
    assert set(re.findall(r"^### (.*)$", PAGE, re.MULTILINE)) == {*RECIPES, "After any of them"}
