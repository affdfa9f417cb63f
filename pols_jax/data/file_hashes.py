"""Hashes of many files, each read once: the cache knows a file again by its path, size, times and inode."""

import hashlib
import itertools
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from pols_jax.data import array_cache
from pols_jax.data.reporting import counted
from pols_jax.files import read_bytes

_KEY_BYTES, _HASH_BYTES = 16, 32

# A file that was written to less than this before it was read may change once more within the clock's resolution, and
# keep its times: it is not cached.
_SETTLED_SECONDS = 2.0


def file_hashes(root: str, files: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Returns the SHA-256 of files in groups, and reads only those that were not hashed before or have changed.

    The hash of a file that cannot be read is empty. The cache is kept for the folder ``root``.

    Examples:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     _ = open(os.path.join(folder, "a"), "wb").close()
      ...     file_hashes(folder, {"all": [os.path.join(folder, "a")]})["all"][0][:8]
      'e3b0c442'
    """
    name = f"hashes-{array_cache.fingerprint(os.path.realpath(root))}"
    directories = [array_cache.user_cache_dir()]
    cached = array_cache.read_arrays(name, directories) or {"keys": (), "hashes": ()}
    pairs = zip(cached["keys"], cached["hashes"], strict=True)
    known = {key.tobytes(): value.tobytes() for key, value in pairs}
    latest = time.time_ns() - int(_SETTLED_SECONDS * 1e9)
    settled: dict[bytes, bytes] = {}

    def hash_one(path: str) -> str:
        try:
            status = os.stat(path)
            times = (status.st_mtime_ns, status.st_ctime_ns)
            identity = (os.path.abspath(path), status.st_size, *times, status.st_dev, status.st_ino)
            key = hashlib.sha256(repr(identity).encode("utf-8", "backslashreplace")).digest()[:_KEY_BYTES]
            digest = known[key].hex() if key in known else hashlib.sha256(read_bytes(path)).hexdigest()
        except OSError:
            return ""
        if max(times) < latest:
            settled[key] = bytes.fromhex(digest)
        return digest

    with ThreadPoolExecutor() as threads:  # reading and hashing are done outside of the interpreter lock
        total = sum(map(len, files.values()))
        every = counted(threads.map(hash_one, itertools.chain(*files.values())), "Reading", total)
        hashes = {group: list(itertools.islice(every, len(paths))) for group, paths in files.items()}
    if settled.keys() - known.keys():
        keys = np.frombuffer(b"".join(settled), np.uint8).reshape(-1, _KEY_BYTES)
        values = np.frombuffer(b"".join(settled.values()), np.uint8).reshape(-1, _HASH_BYTES)
        array_cache.write_arrays(name, {"keys": keys, "hashes": values}, directories)
    return hashes
