"""Formats of the log, text and JSON, and a log file per day. A library below the core."""

from slime_logging.files import daily_file
from slime_logging.formats import FORMATS, JsonLines, TextLines
from slime_logging.lines import Lines
from slime_logging.secrets import hidden_key

__all__ = ["FORMATS", "JsonLines", "Lines", "TextLines", "daily_file", "hidden_key"]
