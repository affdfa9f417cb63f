"""What the command-line scripts share: errors in one sentence, and the exit codes."""

import logging
import signal
import sys
from collections.abc import Callable

from pols_jax.checkpoints import CheckpointError
from pols_jax.config import ConfigError
from pols_jax.data import DataError
from pols_jax.experiments import DivergenceError
from pols_jax.training import InterruptedRunError


def run(main: Callable[[], int | None]) -> int:
    """Calls the main function of a script and turns what it raises into one sentence and an exit code.

    Args:
      main: The function; it returns an exit code, or None for 0.

    Returns:
      0 when done, 2 for wrong input, 130 and 143 after Ctrl-C and SIGTERM, 1 for an error that was foreseen. Any other
      exception is a defect and keeps its traceback.

    Examples:
      >>> run(lambda: None)
      0
    """
    # Orbax says through absl's log how long it waited, and more; what matters is raised.
    logging.getLogger("absl").setLevel(logging.ERROR)
    try:
        return main() or 0
    except (ConfigError, DataError) as error:
        return _fail(error, 2)
    except (CheckpointError, DivergenceError) as error:
        return _fail(error, 1)
    except InterruptedRunError as error:
        return _fail(error, 128 + error.signal_number)
    except KeyboardInterrupt:
        return _fail("Stopped.", 128 + signal.SIGINT)
    except BrokenPipeError:  # the reader of our output has gone, as in `search.py ... | head`
        sys.stderr.close()
        return 128 + signal.SIGPIPE


def _fail(message: object, code: int) -> int:
    print(message, file=sys.stderr)
    return code
