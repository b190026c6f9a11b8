"""Updates of weights: in pieces, unannounced, and missed."""
