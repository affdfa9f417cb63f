"""The documentation site builds without a warning, and its reference has every public name."""

import importlib
import re
import zlib
from pathlib import Path

import mkdocs.config
import mkdocs.utils
import pytest
from mkdocs.commands.build import build

ROOT = Path(__file__).parents[2]
PACKAGES = [path.stem for path in sorted((ROOT / "docs" / "api").glob("*.md")) if path.stem != "index"]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The built site."""
    site = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("NO_MKDOCS_2_WARNING", "1")
        build(mkdocs.config.load_config(str(ROOT / "mkdocs.yml"), site_dir=str(site), strict=True))
    return site


@pytest.fixture(scope="module")
def inventory(site) -> set[str]:
    """Every name that a page of the site documents, from the inventory that other sites link by."""
    # Four lines of header, then compressed lines: "name domain:role priority address title".
    compressed = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    return {line.split(" ")[0] for line in zlib.decompress(compressed).decode().splitlines()}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_in_the_reference(package, inventory):
    public = importlib.import_module(f"pols_jax.{package}").__all__
    assert [name for name in public if f"pols_jax.{package}.{name}" not in inventory] == []


def test_every_package_that_people_import_has_a_page():
    import pols_jax

    rooms = {name for name in dir(pols_jax) if (ROOT / "pols_jax" / name).is_dir()}
    rooms |= {"errors", "heads", "principle"}
    assert rooms <= set(PACKAGES)


def test_formulas_are_shown_without_anything_from_elsewhere(site):
    page = (site / "losses" / "index.html").read_text()
    assert page.count("<math") > 50
    assert "arithmatex" not in page
    for path in site.rglob("*.html"):
        fetched = re.findall(
            r'<(?:script|img)[^>]* src="(https?:[^"]*)"|<link[^>]* rel="stylesheet"[^>]*href="(https?:[^"]*)"',
            path.read_text(),
        )
        assert fetched == [], path


def test_the_equation_of_every_loss_is_in_the_reference_as_its_docstring_has_it(site):
    page = (site / "api" / "losses" / "index.html").read_text()
    assert "math::" not in page
    assert "log(sum_j exp(z_j)) - z_y" in page
