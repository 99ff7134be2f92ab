"""Configuration: what a run is (`schema`) and how it is read (`loading`)."""
