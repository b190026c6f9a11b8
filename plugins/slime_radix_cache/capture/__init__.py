"""A ``/generate`` on its way: its prompts as tokens, its answer recorded."""
