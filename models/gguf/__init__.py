"""GGUF files (github.com/ggml-org/ggml, docs/gguf.md): header, block formats, architectures and vocabulary."""
