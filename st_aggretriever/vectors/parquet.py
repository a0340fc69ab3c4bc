"""A block of vectors as a Parquet file: the columns ``id`` (string) and ``vector`` (fixed-size list of float).

Written without compression, which gains nothing on vectors; DuckDB, pandas, Polars and Spark read it as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np


def write_parquet(file: IO[bytes], ids: Sequence[str], vectors: np.ndarray) -> None:
    """Write n ids and their (n, dim) float32 or float16 vectors.

    Raises:
        ImportError: pyarrow is missing.
        OSError: It can't be written.
    """
    pa, parquet = load_pyarrow()
    vector = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1])
    table = pa.table({"id": pa.array(ids, pa.string()), "vector": vector})
    parquet.write_table(table, file, compression="none", use_dictionary=False)


def read_parquet(path: Path) -> tuple[list[str], np.ndarray]:
    """The ids and the (n, dim) vectors of a file that :func:`write_parquet` wrote.

    Raises:
        ImportError: pyarrow is missing.
        ValueError: Other columns, or no Parquet.
    """
    pa, parquet = load_pyarrow()
    with parquet.ParquetFile(path) as file:
        schema = file.schema_arrow
        if schema.names != ["id", "vector"] or not pa.types.is_fixed_size_list(schema.field("vector").type):
            raise ValueError(f"expected the columns id and vector, got {', '.join(schema.names)}")
        table = file.read()
    column = table["vector"].combine_chunks()
    numbers = column.flatten().to_numpy(zero_copy_only=True)
    return table["id"].to_pylist(), numbers.reshape(len(table), column.type.list_size)


def rows_of_parquet(path: Path) -> int:
    """How many rows a file says it holds."""
    return int(load_pyarrow()[1].read_metadata(path).num_rows)


def load_pyarrow() -> tuple[Any, Any]:
    """``pyarrow`` and ``pyarrow.parquet``.

    Raises:
        ImportError: It isn't installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(f'Parquet needs pyarrow: pip install "st-aggretriever[parquet]" ({error}).') from None
    return pyarrow, pyarrow.parquet
