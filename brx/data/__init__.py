"""Data: documents become token files (`prepare`), and token files become micro-batches
(`batches`)."""
