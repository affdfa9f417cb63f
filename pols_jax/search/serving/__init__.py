"""The server of ``pols serve``: an HTTP API and a page to look at; needs the extra ``[serve]``."""

from pols_jax.search.serving.app import make_app
from pols_jax.search.serving.collection import Collection
from pols_jax.search.serving.running import Server, listen

__all__ = ["Collection", "Server", "listen", "make_app"]
