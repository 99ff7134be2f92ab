"""The paper's own: which experiments, figures and tables it has, and its toy problems."""
