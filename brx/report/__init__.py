"""The HTML page: figures, tables, and a browser of the runs."""
