"""Programs to run and to copy from: they use the public names, as any user would."""
