"""The run stage: capture a plan bound to buffers, replay it, and poison dead memory on request."""
