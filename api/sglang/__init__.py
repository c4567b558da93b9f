"""SGLang's /generate, and its sessions."""
