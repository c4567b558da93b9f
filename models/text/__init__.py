"""A checkpoint's text side: tokenizer, chat template, detokenizer, stop strings, formats of reasoning and calls."""
