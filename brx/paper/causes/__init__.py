"""Why do some optimizers tolerate delay better than others? The study of docs/protocol.md,
section 12, and the verdicts on its predictions.

It measures what delay costs with bases turned by an angle, with different momenta, with different
geometries of the step, and with corrections for delay.

The *cost* of a delay is the final validation loss with the delay minus the one without, seed by
seed, in nats. An *arm* is a method with its settings."""
