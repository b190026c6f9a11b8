"""An SSD tier: preallocated files of checksummed blocks, and a log of which block lies where."""
