"""Answers in OpenAI's schema, whole and streamed."""
