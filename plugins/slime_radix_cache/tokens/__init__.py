"""Text to ids and back, by one tokenizer."""
