"""Several devices: processes, links between neighbours, launch. Knows no method, no file."""
