"""Processes that share out classes, as threads."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from pols_jax.class_shares import ClassShare


def together(work, *, num_classes, count):
    """Calls ``work(share)`` for each of some processes at the same time; returns what they return."""
    barrier, given = threading.Barrier(count), [None] * count

    def gather_of(process):
        def gather(array):
            given[process] = array
            barrier.wait(60)
            gathered = np.stack(given)
            barrier.wait(60)  # before the next one is given
            return gathered

        return gather

    shares = [
        ClassShare.of(num_classes, process=process, count=count, gather=gather_of(process))
        for process in range(count)
    ]
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, shares))
