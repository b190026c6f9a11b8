"""A library below the core: HTTP/1.1 with clients and with workers. It imports neither core nor plugins."""
