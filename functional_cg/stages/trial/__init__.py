"""The certificate: a compiled plan beside its program on real values, before it commits anything."""
