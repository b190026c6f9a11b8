"""The backend that runs models of the library transformers. Its modules need torch, which is an extra."""
