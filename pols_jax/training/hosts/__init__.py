"""Several hosts that train one model. With one host, everything here does nothing.

`joined` is the one way in: it checks the flags, waits for the other hosts with a message, starts ``jax.distributed``, and
ends the others when one host fails. `check_same_settings` finds hosts that were started with other settings before their
first step.
"""

from pols_jax.training.hosts.agreement import (
    check_same_settings,
    from_first_host,
    gather_from_hosts,
    largest_of_hosts,
    same_on_all_hosts,
    sum_of_hosts,
    texts_of_hosts,
)
from pols_jax.training.hosts.joining import joined, peers_told

__all__ = [
    "check_same_settings",
    "from_first_host",
    "gather_from_hosts",
    "joined",
    "largest_of_hosts",
    "peers_told",
    "same_on_all_hosts",
    "sum_of_hosts",
    "texts_of_hosts",
]
