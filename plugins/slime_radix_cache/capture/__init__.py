"""Conversion of the prompts of ``/generate`` requests to tokens, and recording of the answers."""
