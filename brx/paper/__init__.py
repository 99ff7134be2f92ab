"""Everything specific to the paper: its experiments, figures, tables and claims, and the studies
that go beyond it."""
