"""A library for plugins: append-only files of records that survive a kill of the process."""
