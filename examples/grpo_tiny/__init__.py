"""A tiny model learns a toy task through slime-router; see the README of this directory."""
