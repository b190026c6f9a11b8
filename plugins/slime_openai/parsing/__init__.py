"""The text of an answer, split into thoughts, tool calls and content."""
