"""Slipstream inside other libraries' trainers; each module imports its library, which Slipstream does not depend on."""
