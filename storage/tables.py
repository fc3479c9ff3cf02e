"""One Lance table: created with its schema, appended to by fragments or rows, read by column and filter.

Fragments are written by any process and become visible when the driver, the only committer, commits them. Row ids are
stable: they survive compaction.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import lance
import pyarrow as pa
from lance.fragment import write_fragments

from schemas.errors import StoreError

KEPT = timedelta(hours=1)
"""Versions of a table that are younger stay, for whoever is reading one."""
ROWS_PER_FRAGMENT = 4096
"""Fragments of this size are left alone by later compactions, so that those cost what is new, not the whole history."""


class Table:
    """A table at `uri` with a fixed, versioned schema. Opening a table of another schema version raises StoreError."""

    def __init__(self, uri: str, schema: pa.Schema) -> None:
        self.uri = uri
        self.schema = schema
        self._commit_lock = threading.Lock()
        try:
            self._dataset = lance.dataset(uri)
        except (ValueError, OSError) as missing:
            if "not found" not in str(missing).lower():
                raise StoreError(f"{uri}: not a readable Lance table: {missing}") from missing
            self._dataset = lance.write_dataset(schema.empty_table(), uri, schema=schema, enable_stable_row_ids=True)
        self._check_schema()

    def _check_schema(self) -> None:
        found, expected = self._dataset.schema.metadata or {}, self.schema.metadata
        if found != expected:
            raise StoreError(
                f"{self.uri}: found a table of schema {_label(found)}; this version of moltflow reads and writes "
                f"{_label(expected)}; use the version that wrote it, or another run name"
            )

    @property
    def version(self) -> int:
        return int(self._dataset.version)

    def refresh(self) -> None:
        """See what other processes have committed since."""
        self._dataset = lance.dataset(self.uri)

    def write_fragments(self, rows: Sequence[dict[str, Any]]) -> tuple[str, ...]:
        """Write rows without committing them; the result travels to the committer as text."""
        table = pa.Table.from_pylist(list(rows), schema=self.schema)
        fragments = write_fragments(table, self.uri, schema=self.schema, mode="append")
        return tuple(json.dumps(fragment.to_json()) for fragment in fragments)

    def commit(self, fragments: Sequence[str], columns: Sequence[str]) -> pa.Table:
        """Make fragments visible; returns the given columns and `_rowid` of exactly their rows."""
        parsed = [lance.FragmentMetadata.from_json(fragment) for fragment in fragments]
        with self._commit_lock:
            known = {fragment.fragment_id for fragment in self._dataset.get_fragments()}
            dataset = lance.LanceDataset.commit(
                self.uri, lance.LanceOperation.Append(parsed), read_version=self._dataset.version
            )
            self._dataset = dataset
        new = [fragment for fragment in dataset.get_fragments() if fragment.fragment_id not in known]
        return dataset.scanner(columns=list(columns), with_row_id=True, fragments=new).to_table()

    def append(self, rows: Sequence[dict[str, Any]]) -> None:
        """Write and commit rows; they are durable when this returns."""
        if rows:
            self.commit(self.write_fragments(rows), columns=self.schema.names[:1])

    def read(
        self, columns: Sequence[str] | None = None, where: str | None = None, limit: int | None = None
    ) -> pa.Table:
        """Rows as of the last refresh or commit, with `_rowid`, filtered by a SQL expression."""
        names = list(columns) if columns is not None else self.schema.names
        try:
            return self._dataset.scanner(columns=names, filter=where, limit=limit, with_row_id=True).to_table()
        except ValueError as problem:  # also what Arrow raises for a file that is damaged or gone
            asked = f" where {where}" if where else ""
            raise StoreError(f"{self.uri}: cannot be read{asked}: {problem}") from problem

    def take(self, rows: Sequence[int], columns: Sequence[str]) -> list[dict[str, Any]]:
        """Rows by stable row id, in the given order. A missing row raises StoreError."""
        wanted = ", ".join(str(row) for row in rows)
        table = self.read(columns, where=f"_rowid IN ({wanted})") if rows else self.schema.empty_table()
        by_row = {row["_rowid"]: row for row in table.to_pylist()}
        missing = [row for row in rows if row not in by_row]
        if missing:
            raise StoreError(f"{self.uri}: rows {missing[:8]} are not in version {self.version} of the table")
        return [by_row[row] for row in rows]

    def compact(self) -> None:
        """Merge small fragments, so that manifests and filters stay fast; drop old versions, which list them all."""
        with self._commit_lock:
            self._dataset.optimize.compact_files(target_rows_per_fragment=ROWS_PER_FRAGMENT)
            lance.dataset(self.uri).cleanup_old_versions(older_than=KEPT)
            self._dataset = lance.dataset(self.uri)


def _label(metadata: dict[bytes, bytes]) -> str:
    name, version = (metadata.get(key, b"unknown").decode() for key in (b"moltflow.table", b"moltflow.version"))
    return f"{name} {version}"
