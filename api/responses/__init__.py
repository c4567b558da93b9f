"""OpenAI's Responses API, over HTTP and websocket, and its conversations."""
