"""A library below the core: the command line's help, its banner, and messages for a user's mistakes."""
