"""OpenAI's Responses, over HTTP and websocket."""
