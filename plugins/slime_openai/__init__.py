"""OpenAI in, exact tokens out: the plugin ``openai``."""
