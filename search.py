"""The command `pols search`, from a checkout."""

import sys

from pols_jax.cli.running import run
from pols_jax.cli.search import main

if __name__ == "__main__":
    sys.exit(run(main))
