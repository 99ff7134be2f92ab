"""The paper's own: which experiments, figures, tables and claims it has."""
