"""SGLang's API: /generate, and sessions."""
