"""A library below the core: HTTP/1.1 with clients and with workers. It knows no router and no plugin."""
