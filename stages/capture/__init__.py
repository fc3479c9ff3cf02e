"""The chat server that records what a user's agent samples, token by token."""
