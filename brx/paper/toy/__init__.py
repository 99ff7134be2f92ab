"""The paper's two toy landscapes, where the effect of basis alignment on delay can be seen in two dimensions."""
