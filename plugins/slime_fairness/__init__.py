"""A library below the core that keeps large requests from holding up others: JSON in pieces, and turns by client."""
