"""What the README names exists; that its numbers are those of the records is in test_results.py."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_every_file_that_the_readme_names_exists():
    for target in re.findall(r"\]\((?!https:)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
