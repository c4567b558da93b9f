"""Text: tokenizer, chat template, detokenizer, stop strings, parsers of reasoning and tool calls, and grammars."""
