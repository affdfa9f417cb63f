"""The index of behaviors names tests that exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "behaviors.md").read_text()


def functions_of(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_every_test_of_the_index_exists():
    named = set(re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE))
    assert len(named) == len(set(re.findall(r"`[^`]*::[^`]*`", PAGE))) > 100
    existing = {path: functions_of(ROOT / path) for path in dict(named)}
    assert sorted(f"{path}::{name}" for path, name in named if name not in existing[path]) == []


def test_every_behavior_of_the_index_has_a_test():
    rows = [
        line
        for line in PAGE.splitlines()
        if line.startswith("| ") and not line.startswith(("| ---", "| behavior"))
    ]
    assert [row for row in rows if "::test_" not in row] == []


def test_every_file_of_tests_is_in_the_index():
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    assert sorted(path for path in files if f"`{path}::" not in PAGE) == []
