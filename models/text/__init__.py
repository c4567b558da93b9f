"""A checkpoint's text side: tokenizer, chat template, detokenizer, stop strings."""
