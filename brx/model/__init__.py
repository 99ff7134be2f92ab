"""The model: a GPT that can be cut into stages."""
