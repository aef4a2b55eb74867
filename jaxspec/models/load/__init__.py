"""Loaders: checkpoints, GGUF files, tokenizers and networks of other libraries."""
