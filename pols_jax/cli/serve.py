"""``pols serve``: an HTTP API and a page, on this machine, for the pictures of an index or of a folder."""

import contextlib
import dataclasses
import importlib.util
import ipaddress
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from pols_jax.cli.compiling import keep_compiled_programs
from pols_jax.cli.flags import Page, parse
from pols_jax.cli.running import announce
from pols_jax.errors import ConfigError, printable
from pols_jax.settings import Range, check_settings

if TYPE_CHECKING:
    from pols_jax.search.class_bank import ClassBank


@dataclasses.dataclass(frozen=True)
class Flags:
    """Serve an HTTP API and a page for search.

    Attributes:
      sources: A trained run, or indexes that pols index made.
      folder: Watch this folder too: what is in it is indexed, and new pictures are shown as they come.
      index: Keep the index of the folder in this directory; by default it is made anew.
      run: Where the run of the indexes is now, if it has moved.
      raw: Use the logits as they are, without the normalizer.
      host: The address to listen at; another one than that of this machine lets others in.
      port: The port to listen at; 0 takes any that is free.
      compilation_cache: Keep compiled programs for the next start.
    """

    sources: tyro.conf.Positional[tuple[Path, ...]] = ()
    folder: Path | None = None
    index: Path | None = None
    run: Path | None = None
    raw: bool = False
    host: str = "127.0.0.1"
    port: Annotated[int, Range(least=0, most=65535)] = 8000
    compilation_cache: bool = True

    def __post_init__(self):
        """Checks the port."""
        check_settings(self)


PAGE = Page(
    "pols serve",
    "RUN|INDEX... [--folder FOLDER] [FLAGS]",
    "Serve a page and an HTTP API that find every picture of a class, answer whether an upload is of a class, and show new "
    "pictures of a folder as they come. Ctrl-C ends it.",
    """
pols serve runs/mine --folder photos
pols index runs/mine photos --out photos.index && pols serve photos.index
pols serve photos.index --folder camera --index camera.index --port 9000
""",
    {"what to serve": "sources folder index run raw", "where": "host port compilation_cache"},
    "Everything that listens beyond this machine can be asked by everybody who reaches it: there is no password. The API is "
    "described at /api/openapi.json.",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Serves until a signal comes."""
    flags = parse(Flags, arguments, PAGE)
    if not flags.sources:
        raise ConfigError("Say what to serve: pols serve RUN --folder FOLDER, or pols serve INDEX.")
    if flags.index is not None and flags.folder is None:
        raise ConfigError("--index says where the index of a --folder is kept; name the folder.")
    if flags.folder is not None and not flags.folder.is_dir():
        raise ConfigError(f"There is no folder {flags.folder} to watch; create it, or name another.")
    if missing := [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]:
        raise ConfigError(
            f"pols serve needs {' and '.join(missing)}: install them with pip install 'pols-jax[serve]'."
        )
    announce("starting JAX ...")
    if flags.compilation_cache:
        keep_compiled_programs()
    from pols_jax.evaluation.measuring import progress_bars
    from pols_jax.search.index import FeatureIndex
    from pols_jax.search.serving import Collection, Server, make_app
    from pols_jax.search.serving.guard import LOOPBACK
    from pols_jax.search.serving.live import Feed, FolderIndex, FolderWatcher
    from pols_jax.search.serving.running import listen

    with contextlib.ExitStack() as stack:
        # First of all: a port that is in use is known before anything takes its time.
        sock = stack.enter_context(listen(flags.host, flags.port))
        bank, indexes = _opened(flags)
        feed, folder = Feed(), None if flags.folder is None else str(flags.folder.absolute())
        if folder is None:
            index, live = FeatureIndex.open(*indexes) if indexes else None, None
        else:
            directory = flags.index or stack.enter_context(
                tempfile.TemporaryDirectory(prefix="pols-serve-", ignore_cleanup_errors=True)
            )
            live = FolderIndex(bank, folder, directory, indexes)
            with progress_bars(quiet=False) as progress:
                task = progress.add_task("pictures", total=None)
                index, _ = live.update(lambda done, all_: progress.update(task, completed=done, total=all_))
        name = Path(bank.place).absolute().name
        collection = Collection(bank, index, name=name, folder=folder)
        announce("warming up ...")
        collection.warm_up()
        if live is not None:
            stack.enter_context(FolderWatcher(live, collection, feed))
        is_local = ipaddress.ip_address(sock.getsockname()[0]).is_loopback
        hosts = LOOPBACK | {flags.host} if is_local else None
        app = make_app(collection, feed=None if live is None else feed, hosts=hosts)
        server = stack.enter_context(Server(app, sock, on_stop=feed.close))
        if hosts is None:
            print(
                f"Warning: everybody who reaches {server.address} can see these pictures; there is no password.",
                file=sys.stderr,
            )
        pictures = f"{collection.view.num_pictures:,} pictures, {len(bank.names):,} classes"
        print(f"{server.address} serves {pictures}. Ctrl-C ends it.", flush=True)
        server.wait()


def _opened(flags: Flags) -> "tuple[ClassBank, list[Path]]":
    """The network, and the indexes if some are named."""
    from pols_jax.search.class_bank import ClassBank
    from pols_jax.search.index import FeatureIndex, is_index

    indexes = [source for source in flags.sources if is_index(source)]
    others = [source for source in flags.sources if source not in indexes]
    if len(others) > 1 or (others and indexes):
        raise ConfigError(
            f"Name one run, or indexes: {printable(others[0])} is no index; the run of an index goes to --run."
        )
    if others and flags.run is not None:
        raise ConfigError("--run is for indexes: it says where their run is now.")
    if others:
        announce(f"opening {others[0]} ...")
        return ClassBank.open(others[0], raw=flags.raw), []
    index = FeatureIndex.open(*indexes)
    run_dir = flags.run or Path(index.run_dir)
    if flags.run is None and not run_dir.is_dir():
        raise ConfigError(
            f"The run of {indexes[0]} is no longer in {run_dir}; say where it is with --run DIR."
        )
    announce(f"opening {run_dir} ...")
    bank = ClassBank.open(run_dir, raw=flags.raw)
    index.check(bank)
    return bank, indexes
