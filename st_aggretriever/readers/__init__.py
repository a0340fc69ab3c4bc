"""Readers: files to streamed records, one format a file."""
