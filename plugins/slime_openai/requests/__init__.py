"""Bodies of OpenAI requests, read once."""
