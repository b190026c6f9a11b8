"""A library below the core: large requests that hold up no others. JSON in pieces, and turns by client."""
