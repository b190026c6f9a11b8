"""An SSD tier: preallocated files of checksummed blocks, and a log of the block in each slot."""
