"""Several devices: processes, links between neighbours, launch. Knows the engine's actions, no method, no file."""
