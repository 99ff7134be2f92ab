"""Data: documents into token files (`prepare`), token files into micro-batches (`batches`)."""
