"""Inner-product search: exact, approximate and by words, in memory and on disk, one engine a file."""

from st_aggretriever.search.exact import Hits, search

__all__ = ["Hits", "search"]
