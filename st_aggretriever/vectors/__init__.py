"""Vectors and ids on disk: blocks that are whole or absent, shards of them, and what is checked."""

from st_aggretriever.vectors.folder import VectorFolder, VectorWriter

__all__ = ["VectorFolder", "VectorWriter"]
