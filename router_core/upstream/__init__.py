"""HTTP/1.1 to one worker."""
