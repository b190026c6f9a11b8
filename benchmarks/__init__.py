"""Scripts for the figures in the documents; README.md says how to run them."""
