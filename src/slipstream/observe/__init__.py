"""Facts about the host (`host`) and the environment report (`report`)."""
