"""Assembling and running one training: build, loop, recorder."""
