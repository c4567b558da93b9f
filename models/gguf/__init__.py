"""The format GGUF (github.com/ggml-org/ggml, docs/gguf.md): the header of a file, and block formats."""
