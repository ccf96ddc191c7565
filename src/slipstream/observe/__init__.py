"""What can be told of a run and its surroundings: facts of the host (`host`), the environment report (`report`)."""
