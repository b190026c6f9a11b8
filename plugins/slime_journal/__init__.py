"""A library for plugins: append-only files of records that outlive a kill."""
