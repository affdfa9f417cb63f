"""The command `pols bench`, from a checkout."""

import sys

from pols_jax.cli.bench import main
from pols_jax.cli.running import run

if __name__ == "__main__":
    sys.exit(run(main))
