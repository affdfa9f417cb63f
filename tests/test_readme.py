"""The numbers in the README are those of the records in results/."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_quickstart_table_is_that_of_its_record():
    records = {
        r["loss"]: r for r in json.loads((ROOT / "results" / "quickstart.json").read_text())["records"]
    }
    for name, label in (("cross_entropy", "cross-entropy"), ("batch_cross_entropy", "batch cross-entropy")):
        row = re.search(rf"^\| {label} \|(.*)\|$", README, re.MULTILINE)[1].replace("*", "")
        shown = [float(cell) for cell in row.split("|")]
        record = records[name]
        shared = next(
            t
            for t in record["thresholds"]
            if (t["rule"], t["chosen_for"]) == ("precision=0.9", "all classes")
        )
        measured = [
            1 - record["slc"]["auprc"],
            1 - record["all_logits"]["auprc"],
            record["accuracy"],
            shared["mean_recall"],
        ]
        assert shown == [round(value, 3) for value in measured], name


def test_every_file_that_the_readme_names_exists():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
