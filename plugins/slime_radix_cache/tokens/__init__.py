"""Conversion of text to token ids and back, with one tokenizer."""
